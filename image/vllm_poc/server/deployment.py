# SPDX-License-Identifier: Apache-2.0
"""Whether PoC can run with the processes that a command line of vLLM asks for."""

from collections.abc import Mapping

# Options of vLLM that make several API servers or engines, with the values that do not.
_SEVERAL: Mapping[str, tuple[object, ...]] = {
    "api_server_count": (None, 1),
    "data_parallel_size": (None, 1),
    "data_parallel_size_local": (None, 1),
    "data_parallel_rank": (None,),
    "data_parallel_start_rank": (None,),
    "data_parallel_hybrid_lb": (None, False),
    "data_parallel_external_lb": (None, False),
    "data_parallel_multi_port_external_lb": (None, False),
}


def refusal(arguments: object, environment: Mapping[str, str]) -> str | None:
    """Return one sentence that names the option and the remedy, or None; ``arguments`` are vLLM's, parsed."""
    culprits = [
        f"--{name.replace('_', '-')}"
        for name, harmless in _SEVERAL.items()
        if getattr(arguments, name, None) not in harmless
    ]
    if environment.get("VLLM_DP_SIZE", "1") != "1":
        culprits.append("VLLM_DP_SIZE")
    if not culprits:
        return None
    # Each API server would have a round of its own, and each engine would compute the same nonces.
    return f"PoC needs one API server with one engine: leave {culprits[0]} out, and start several pods instead."
