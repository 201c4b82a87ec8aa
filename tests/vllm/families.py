# SPDX-License-Identifier: Apache-2.0
"""The model families that are shown to work, and what shows in the results of each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from tests.vllm.device import ON_GPU, older_than

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.vllm.client import Client
    from tests.vllm.reference import Reference

#: PoC's flags by their parts, since the extension is one that can also tell checksums.
CHECKSUMS = ("--worker-extension-cls", "tests.vllm.worker_checks.CheckingExtension")
POC_WITH_CHECKSUMS = (*CHECKSUMS, "--middleware", "vllm_poc.server.app.PocMiddleware")
# Which of the CPU's two backends is chosen would depend on the CPU, and one of them has no float32.
_LATENT_ON_CPU = () if ON_GPU else ("--attention-backend", "CPU_MLA")

#: The server's flags. Llama is as users start it; where CUDA graphs would be captured, experts have them.
FAMILIES: dict[str, Sequence[str]] = {
    "qwen3": ("--enforce-eager", *POC_WITH_CHECKSUMS),
    "qwen3-moe": POC_WITH_CHECKSUMS if ON_GPU else ("--enforce-eager", *POC_WITH_CHECKSUMS),
    "deepseek": ("--enforce-eager", *_LATENT_ON_CPU, *POC_WITH_CHECKSUMS),
    "gemma3": ("--enforce-eager", *POC_WITH_CHECKSUMS),
    "llama": ("--enable-poc",),
}


def is_servable(name: str) -> bool:
    """Whether the vLLM here has all that a family's server needs.

    Releases before CPU_MLA serve no DeepSeek on a CPU, and 0.28 there imports what it has on GPUs alone.
    """
    if name != "deepseek" or ON_GPU:
        return True
    backends = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    fails = older_than(0, 29) and not older_than(0, 28)
    return "CPU_MLA" in backends.__members__ and not fails


def _permute_experts(reference: Reference) -> None:
    for name, values in reference.model.named_parameters():
        if name.endswith(".gate.weight"):
            values.data = values.data.roll(1, 0)


def _widen_window(reference: Reference) -> None:
    reference.model.config.sliding_window = 1024


#: Changes that must show in the results, or equality would not tell right from wrong.
CHANGES: dict[str, Callable[[Reference], None]] = {
    "qwen3-moe": _permute_experts,
    "deepseek": _permute_experts,
    "gemma3": _widen_window,
}


class Family(NamedTuple):
    """A server and the same model in another library."""

    name: str
    client: Client
    reference: Reference
