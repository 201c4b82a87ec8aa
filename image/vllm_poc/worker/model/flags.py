# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM by which two servers of the same model and kernels may differ in their results, as they took effect.

vLLM sets some of them itself, so they are read of its configuration and not of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Where each of them stands. They decide over how many ranks and blocks a sum is spread, and who adds it up.
_SIZES: Mapping[str, str] = {
    "--tensor-parallel-size": "parallel_config.tensor_parallel_size",
    "--pipeline-parallel-size": "parallel_config.pipeline_parallel_size",
    "--block-size": "cache_config.block_size",
}
_SWITCHES: Mapping[str, str] = {
    "--enforce-eager": "model_config.enforce_eager",
    "--disable-custom-all-reduce": "parallel_config.disable_custom_all_reduce",
    "--enable-expert-parallel": "parallel_config.enable_expert_parallel",
    "--enable-eplb": "parallel_config.enable_eplb",
}


def result_flags(config: object) -> list[str]:
    """Return those that are on, and sizes other than 1."""
    sizes = {flag: part(config, path) for flag, path in _SIZES.items()}
    switches = [flag for flag, path in _SWITCHES.items() if part(config, path)]
    return [*(f"{flag}={size}" for flag, size in sizes.items() if size not in (None, 1)), *switches]


def part(config: object, path: str) -> object:
    """Return a part of the configuration by the names that lead to it; None where the release has none."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config
