# SPDX-License-Identifier: Apache-2.0
"""What depends on the device that vLLM runs on here: the server's flags, how closely results agree, and time limits."""

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

# Without torch the tests are skipped, but their modules must load to say so.
_TORCH = import_module("torch") if find_spec("torch") is not None else None
ON_GPU: bool = _TORCH is not None and _TORCH.cuda.is_available()
#: How a model is spread over two ranks.
LAYOUTS = {"tp": ("--tensor-parallel-size", "2"), "pp": ("--pipeline-parallel-size", "2")}
#: Two ranks on a CPU: one core each.
PARALLEL_ENVIRONMENT = {} if ON_GPU else {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
#: Why two ranks cannot run here, or None.
WHY_NOT_PARALLEL = "needs two GPUs" if _TORCH is not None and _TORCH.cuda.device_count() == 1 else None
#: Why vLLM cannot compute models of several residual streams on this CPU, or None: its build for others than those with
#: AVX-512 for bfloat16 lacks their kernels. It asks torch in the same way.
WHY_NO_STREAMS = (
    "vLLM has the kernels of residual streams only for CPUs with AVX-512 for bfloat16"
    if _TORCH is not None and not ON_GPU and not _TORCH.cpu._is_avx512_bf16_supported()
    else None
)
#: vLLM's attention on a GPU has no float32. Several servers share the GPU: one that measured what it may take for its
#: cache would fail when another ends meanwhile.
SERVER_FLAGS = (
    ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(4 * 2**30))
    if ON_GPU
    else ("--dtype", "float32")
)
#: Without it, how a GPU rounds depends on which chats share a batch, also on an idle server.
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"} if ON_GPU else {}
#: Largest difference of an artifact's number from a float32 reference. In float32 only the rounding
#: to fp16 is left, half a unit in the last place of which is 2.4e-4.
ARTIFACT_TOLERANCE = 0.04 if ON_GPU else 5e-4
#: The same for a distance; distances of different nonces are about 8e-3 apart.
DISTANCE_TOLERANCE = 1e-3 if ON_GPU else 2e-5
#: Largest difference of an artifact's number between batches of different sizes.
BATCH_TOLERANCE = 0.06 if ON_GPU else 1e-3


def older_than(*release: int) -> bool:
    """Whether vLLM is here and older. Its metadata tells, since an import takes half a minute."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return tuple(map(int, version(name).split(".")[: len(release)])) < release
    return False


def lacks(folder: str) -> bool:
    """Whether vLLM is here and has no such folder: a package may be there without all of its models."""
    spec = find_spec("vllm")
    return spec is not None and not any(Path(root, folder).is_dir() for root in spec.submodule_search_locations or ())


def skip_without_drafts() -> None:
    """Skip the test where vLLM's own drafts fail.

    0.23 for CPU lacks an argument that its sampler gives, and 0.30 does not know the parameters of its kernels there.
    """
    stand_ins = _source("utils/cpu_triton_utils.py")
    lacks_an_argument = bool(stand_ins) and "USE_FP64_GUMBEL" not in stand_ins
    if not ON_GPU and (lacks_an_argument or (older_than(0, 31) and not older_than(0, 30))):
        pytest.skip("this release of vLLM cannot draft on a CPU")


def _source(file: str) -> str:
    spec = find_spec("vllm")
    roots = (spec.submodule_search_locations or []) if spec is not None else []
    return "".join(Path(root, file).read_text() for root in roots if Path(root, file).is_file())
