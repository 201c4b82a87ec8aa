# SPDX-License-Identifier: Apache-2.0
"""The decode scheme of a fleet's pods: variables, codebook, and the memory that presets leave for chains."""

from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet_decode import reserve_bytes
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.render import Object, render
from poc_operator.fleets.resolve import ANY, GpuEntry, Preset, Refusal, Resolved, packaged, resolve
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

MINIMAX: dict[str, Any] = {"model": {"preset": "minimax-m2.7"}}
BOOK = {"codebook": {"configMap": "codebook"}}
#: Bytes of keys and values of a token in all layers and heads: layers, heads, numbers of a head, bytes of a number.
TOKEN = {"minimax-m2.7": 2 * 62 * 8 * 128 * 1, "qwen3-0.6b": 2 * 28 * 8 * 128 * 2}
#: Tokens of the network's chains, of a block of vLLM, and of the longest sequence that chat must have room for.
CHAIN, BLOCK, SEQUENCE = 512, 16, {"minimax-m2.7": 180_000, "qwen3-0.6b": 8192}
#: GiB of a GPU, as PyTorch sees them; the least that is sold for the preset that fits any.
MEMORY = {"H100": 79, "H200": 139, "any": 15}
#: GiB of a GPU that vLLM takes beside weights, keys and values: 4 x H100 have room for 605 chains in what 0.90 leaves.
OTHER = {"minimax-m2.7": 8.2, "qwen3-0.6b": 4}


def pod_of(**spec: Any) -> Object:  # noqa: ANN401
    fleet = a_fleet(**spec)
    found = resolve(fleet.spec, AROUND)
    assert isinstance(found, Resolved), found
    template: Object = render(fleet, found, AROUND)[-1]["spec"]["template"]["spec"]
    return template


def decoding(pod: Object) -> dict[str, str]:
    """Return the variables of the decode scheme."""
    env = pod["containers"][0]["env"]
    return {one["name"]: one["value"] for one in env if one["name"].startswith("VLLM_POC_DECODE_")}


def refused(**spec: Any) -> str:  # noqa: ANN401
    found = resolve(a_fleet(**spec).spec, AROUND)
    assert isinstance(found, Refusal), found
    assert found.reason is Reason.DECODE_UNSUPPORTED
    return found.message


def test_a_codebook_of_a_config_map_is_mounted() -> None:
    pod = pod_of(**MINIMAX, decode=BOOK)
    assert decoding(pod) == {
        "VLLM_POC_DECODE_CODEBOOK": "/codebook/sphere_codebook.pt",
        "VLLM_POC_DECODE_RESERVE_BYTES": str(4 * 2**30),
    }
    items = [{"key": "sphere_codebook.pt", "path": "sphere_codebook.pt"}]
    assert {"name": "codebook", "configMap": {"name": "codebook", "items": items}} in pod["volumes"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "codebook", "mountPath": "/codebook", "readOnly": True} in mounts


@pytest.mark.parametrize(
    ("decode", "variables"),
    [
        ({"codebook": {"path": "/cache/c.pt"}}, {"VLLM_POC_DECODE_CODEBOOK": "/cache/c.pt"}),
        ({"rebuildCodebook": True}, {"VLLM_POC_DECODE_REBUILD_CODEBOOK": "1"}),
    ],
)
def test_other_codebooks_need_no_volume(decode: dict[str, Any], variables: dict[str, str]) -> None:
    pod = pod_of(decode={**decode, "reserve": "512Mi"})
    assert decoding(pod) == {**variables, "VLLM_POC_DECODE_RESERVE_BYTES": str(512 * 2**20)}
    assert pod["volumes"] == pod_of()["volumes"]


def test_flags_of_a_preset_for_chains_come_after_its_others_and_before_the_users() -> None:
    args = pod_of(**MINIMAX, decode=BOOK, engineArgs=["--gpu-memory-utilization=0.5"])["containers"][0]["args"]
    assert [flag for flag in args if flag.startswith("--gpu-memory-utilization")] == [
        "--gpu-memory-utilization=0.95",
        "--gpu-memory-utilization=0.92",
        "--gpu-memory-utilization=0.5",
    ]
    assert "--attention-backend=FLASH_ATTN" in args
    without = pod_of(**MINIMAX)
    assert "--attention-backend=FLASH_ATTN" not in without["containers"][0]["args"]
    assert decoding(without) == {}


def test_a_preset_without_memory_for_chains_is_refused_with_the_remedy() -> None:
    message = refused(**MINIMAX, gpu={"product": "NVIDIA-B200"}, decode=BOOK)
    assert message.startswith("preset minimax-m2.7 on 2 × B200 has no memory for the decode scheme: remove decode")  # noqa: RUF001
    more = refused(**MINIMAX, gpu={"product": "NVIDIA-B200"}, decode={**BOOK, "reserve": "5Gi"})
    assert "leaves nothing of each GPU for it: set --gpu-memory-utilization in engineArgs" in more


def test_a_larger_reserve_needs_a_flag_that_leaves_it() -> None:
    larger: dict[str, Any] = {**MINIMAX, "decode": {**BOOK, "reserve": "6Gi"}}
    assert "decode.reserve is 6Gi, and preset minimax-m2.7 on 2 × H200 leaves 4Gi" in refused(**larger)  # noqa: RUF001
    for flag in ("--gpu-memory-utilization=0.9", "--gpu_memory_utilization=0.9"):
        pod = pod_of(**larger, engineArgs=[flag])
        assert decoding(pod)["VLLM_POC_DECODE_RESERVE_BYTES"] == str(6 * 2**30)
    smaller = pod_of(**MINIMAX, decode={**BOOK, "reserve": "1024Mi"})
    assert decoding(smaller)["VLLM_POC_DECODE_RESERVE_BYTES"] == str(2**30)


def entries() -> list[tuple[Preset, GpuEntry]]:
    presets = [preset for preset in packaged().values() if isinstance(preset, Preset)]
    return [(preset, gpu) for preset in presets for gpu in preset.gpus if gpu.decode is not None]


def utilization(args: tuple[str, ...]) -> float:
    found = [float(flag.partition("=")[2]) for flag in args if flag.startswith("--gpu-memory-utilization=")]
    return found[-1]


def chains_of(name: str, gpu: GpuEntry) -> int:
    """Return how many chains the reserve of an entry holds, beside the first block, which stays empty."""
    assert gpu.decode is not None
    token = TOKEN[name] // gpu.tensor
    return (reserve_bytes(gpu.decode.reserve) - BLOCK * token) // (CHAIN * token)


def test_the_chains_of_the_presets_are_those_of_the_docs() -> None:
    found = {(preset.name, gpu.product): chains_of(preset.name, gpu) for preset, gpu in entries()}
    assert found == {("minimax-m2.7", "H100"): 198, ("minimax-m2.7", "H200"): 132, ("qwen3-0.6b", "any"): 36}


@pytest.mark.parametrize(("preset", "gpu"), [pytest.param(*one, id=f"{one[0].name} {one[1]}") for one in entries()])
def test_flags_leave_the_reserve_and_room_for_the_longest_chat(preset: Preset, gpu: GpuEntry) -> None:
    assert gpu.decode is not None
    memory, with_chains = MEMORY[gpu.product], utilization(gpu.all_args)
    # What a preset without the flag leaves to PoC is unknown for any GPU: there the rest has to do.
    before = 1.0 if gpu.product == ANY else utilization(gpu.args)
    assert (before - with_chains) * memory >= reserve_bytes(gpu.decode.reserve) / 2**30
    weights = (preset.weights_gib or 0) / gpu.count
    room = with_chains * memory - weights - OTHER[preset.name]
    assert room >= SEQUENCE[preset.name] * TOKEN[preset.name] / gpu.tensor / 2**30
