# SPDX-License-Identifier: Apache-2.0
"""Models on which PoC cannot run are refused with the reason, and served for chat all the same."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest

from poc_operator.fleets.resolve import Preset, packaged
from tests.vllm.device import ON_GPU, lacks
from tests.vllm.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# On a GPU, vLLM takes the kernels of such models from flashinfer.
KERNELS_FOR_LINEAR_ATTENTION = not ON_GPU or find_spec("flashinfer") is not None
on_one_device = pytest.mark.skipif(ON_GPU, reason="asks what a model is made of, which the CPU has shown")


def a_connector(
    name: str, module: str | None = None, several: Sequence[SimpleNamespace] = (), **options: object
) -> SimpleNamespace:
    parts = {"connectors": [vars(one) for one in several]} if several else options
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=parts)


def drafting_by(*layers: str) -> SimpleNamespace:
    drafts = SimpleNamespace(hf_config=SimpleNamespace(architectures=list(layers)))
    return SimpleNamespace(method="mtp", draft_model_config=drafts)


EXAMPLE = a_connector("ExampleConnector")


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from tests.vllm.refused import one_rank  # noqa: PLC0415 - needs vLLM

    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@on_one_device
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BertModel", "generates nothing under --runner pooling"),
        ("WhisperForConditionalGeneration", "reads the output of an encoder"),
        ("Qwen3ForCausalLM", "has positions of several dimensions"),
        ("Gemma3nForCausalLM", "reads more of the tokens than one embedding each"),
        ("Gemma4ForCausalLM", "reads another's KV cache"),
    ],
)
@pytest.mark.usefixtures("rank")
def test_a_model_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    found = refusal(*build(name, tmp_path))
    assert found is not None
    assert reason in found


@on_one_device
@pytest.mark.usefixtures("rank")
def test_routing_by_token_is_refused_where_nonces_have_no_tokens(tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("DeepseekV4ForCausalLM", tmp_path)
    assert refusal(config, model) is None
    config.model_config.hf_config.model_type = "another"
    assert "routes experts by token id" in (refusal(config, model) or "")


@on_one_device
@pytest.mark.skipif(lacks("models/glm5next"), reason="this release of vLLM has no GLM-5.3")
@pytest.mark.skipif(lacks("models/glm5next/common"), reason="this release of vLLM builds GLM-5.3 on a GPU only")
@pytest.mark.usefixtures("rank")
def test_what_has_been_compared_with_some_flags_is_refused_without_them(tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.extension import PocWorkerExtension  # noqa: PLC0415
    from vllm_poc.worker.model.capabilities import refusal, unproven  # noqa: PLC0415

    config, model = build("Glm5NextForConditionalGeneration", tmp_path)
    assert refusal(config, model) is None, "tests compare it"
    worker = PocWorkerExtension()
    worker.model_runner = SimpleNamespace(vllm_config=config, get_model=lambda: model)
    assert "start vLLM with --kda-prefill-backend triton" in str(worker.poc_describe().get("refusal"))
    for backend, force, right in (("flashkda", True, False), ("triton", False, False), ("triton", True, True)):
        config.additional_config = {"kda_prefill_backend": backend}
        config.attention_config.sparse_mla_force_mqa = force
        assert (unproven(config) is None) is right
    config.cache_config.cache_dtype = "fp8"
    assert "start vLLM with --kv-cache-dtype auto" in (refusal(config, model) or "")


PRESETS = [preset for preset in packaged().values() if isinstance(preset, Preset)]
#: Flags of presets that this machine, or the model that stands for theirs, does not take.
NEEDS_THE_MODEL_OR_A_GPU = (
    *("--attention-backend", "--block-size", "--gpu-memory-utilization", "--max-model-len"),
    *("--tokenizer-mode", "--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"),
)
#: Where the flag is in one release or another that records experts.
RECORDING = ("model_config.enable_return_routed_experts", "aux_output_config.enable_return_routed_experts")
#: Settings that came with one of the later releases, or that vLLM has taken back.
NOT_EVERYWHERE = {
    "attention_config.hisparse_config",
    "attention_config.indexer_kv_dtype",
    "attention_config.indexer_sparse_logits",
    "attention_config.use_fp4_indexer_cache",
    "cache_config.calculate_kv_scales",
    "cache_config.kv_cache_layout",
    "diffusion_config",
    "parallel_config.enable_elastic_ep",
    "parallel_config.enable_fault_tolerance",
    "parallel_config.enable_hc_sp",
    *RECORDING,
}


def has(config: object, path: str) -> bool:
    *owners, name = path.split(".")
    return hasattr(reduce(lambda part, owner: getattr(part, owner, None), owners, config), name)


@on_one_device
@pytest.mark.usefixtures("rank")
def test_the_release_has_all_settings_that_are_judged_and_its_defaults_are_proven(tmp_path: Path) -> None:
    """One that is called otherwise would count as off."""
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.flags import JUDGED, settings_refusal  # noqa: PLC0415

    config, _ = build("OPTForCausalLM", tmp_path)
    assert settings_refusal(config) is None
    assert {setting.path for setting in JUDGED if not has(config, setting.path)} - NOT_EVERYWHERE == set()


@on_one_device
@pytest.mark.parametrize("preset", PRESETS, ids=[preset.name for preset in PRESETS])
def test_no_setting_of_a_preset_is_refused(preset: Preset, tmp_path: Path) -> None:
    """Nor one that vLLM derives of them: on a CPU all those that need no GPU, on any model."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - needs vLLM

    from tests.vllm.refused import write_config  # noqa: PLC0415
    from vllm_poc.cli import parse_as_server  # noqa: PLC0415
    from vllm_poc.worker.model.flags import settings_refusal  # noqa: PLC0415

    write_config("OPTForCausalLM", tmp_path)
    if preset.name == "glm-5.3-flash" and lacks("models/glm5next"):
        pytest.skip("this release of vLLM has no GLM-5.3")
    for gpu in preset.gpus:
        flags = [flag for flag in (*preset.args, *gpu.args) if not flag.startswith(NEEDS_THE_MODEL_OR_A_GPU)]
        words = ["--model", str(tmp_path), *flags, "--max-model-len=128", "--skip-tokenizer-init"]
        config = EngineArgs.from_cli_args(parse_as_server(words)).create_engine_config()
        assert settings_refusal(config) is None


@on_one_device
@pytest.mark.usefixtures("rank")
def test_a_flag_is_refused_that_records_experts(tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    (owner,) = {path.partition(".")[0] for path in RECORDING if has(config, path)}
    object.__setattr__(getattr(config, owner), "enable_return_routed_experts", True)
    assert "--enable-return-routed-experts" in (refusal(config, model) or "")


@on_one_device
@pytest.mark.usefixtures("rank")
def test_layers_are_refused_that_do_more_than_their_attention_says(tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    *_, layer = config.compilation_config.static_forward_context.values()
    layer.attn_type = "encoder_only"
    assert "not proven with attention of type encoder_only" in (refusal(config, model) or "")
    layer.attn_type = "decoder"
    assert refusal(config, model) is None
    layer.__class__ = type("SinkAttention", (type(layer),), {})
    assert "not proven with SinkAttention" in (refusal(config, model) or "")


@on_one_device
@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("lora_config", SimpleNamespace(), None),
        ("kv_transfer_config", EXAMPLE, None),
        ("kv_transfer_config", a_connector("MultiConnector", None, [EXAMPLE, EXAMPLE]), None),
        (
            "kv_transfer_config",
            a_connector("MultiConnector", None, [EXAMPLE, a_connector("MultiConnector", None, [a_connector("New")])]),
            "the KV connector New: start vLLM without",
        ),
        ("kv_transfer_config", a_connector("MultiConnector", "own.module", [EXAMPLE]), "MultiConnector of own.module"),
        (
            "kv_transfer_config",
            a_connector("ExampleConnector", "own.module"),
            "the KV connector ExampleConnector of own",
        ),
        ("kv_transfer_config", a_connector("NixlConnector"), "the KV connector NixlConnector: start vLLM without"),
        (
            "kv_transfer_config",
            a_connector("MultiConnector"),
            "without --kv-transfer-config, or with --kv-offloading-size alone",
        ),
        (
            "kv_transfer_config",
            a_connector("MultiConnector", None, [EXAMPLE, a_connector("OffloadingConnector", lazy=True)]),
            "the KV connector OffloadingConnector with lazy: start vLLM",
        ),
        ("kv_transfer_config", a_connector("OffloadingConnector", cpu_bytes_to_use=2**30), None),
        ("kv_transfer_config", a_connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=2**30), None),
        (
            "kv_transfer_config",
            a_connector("OffloadingConnector", cpu_bytes_to_use=2**30, spec_name="Other"),
            "the KV connector OffloadingConnector with spec_name: start vLLM",
        ),
        (
            "model_config.quantization",
            "modelopt",
            "modelopt: serve the model unquantized, or with vLLM's quantization fp8",
        ),
        ("model_config.quantization_config", SimpleNamespace(moe="mxfp4"), "start vLLM without it"),
        ("parallel_config.data_parallel_size", 2, "--data-parallel-size 1 instead of 2"),
        ("parallel_config.enable_expert_parallel", True, None),
        ("parallel_config.enable_eplb", True, None),
        ("parallel_config.enable_elastic_ep", True, "--enable-elastic-ep: start vLLM without it"),
        ("parallel_config.expert_placement_strategy", "round_robin", "without it"),
        ("offload_config.uva.cpu_offload_gb", 1.0, "start vLLM without --cpu-offload-gb"),
        ("offload_config.prefetch.offload_group_size", 2, "start vLLM without --offload-group-size"),
        ("speculative_config", SimpleNamespace(method="eagle3"), "not proven beside the drafts of eagle3"),
        ("speculative_config", SimpleNamespace(method="ngram"), None),
        ("speculative_config", drafting_by("MiMoMTPModel"), None),
        ("speculative_config", drafting_by("DeepSeekMTPModel"), None),
        ("speculative_config", drafting_by("NewMTPModel"), "not proven beside the drafts of NewMTPModel"),
        ("speculative_config", drafting_by(), "not proven beside the drafts of mtp"),
        ("speculative_config", SimpleNamespace(method="mtp"), 'or with "method": "ngram"'),
    ],
)
@pytest.mark.usefixtures("rank")
def test_parts_of_the_configuration_are_refused_by_their_flags(
    path: str, value: object, reason: str | None, tmp_path: Path
) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    assert refusal(config, model) is None
    *owners, name = path.split(".")
    part: object = config
    for owner in owners:
        part = getattr(part, owner)
    assert hasattr(part, name), "this release calls it otherwise"
    object.__setattr__(part, name, value)
    assert reason in refusal(config, model) if reason else refusal(config, model) is None  # type: ignore[operator]


@on_one_device
@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("simple", ["0", "1"])
def test_offloading_by_its_flag_is_allowed(simple: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes a KV connector of it, of one of two kinds."""
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    config, model = build("OPTForCausalLM", tmp_path, kv_offloading_size=1)
    assert config.kv_transfer_config is not None
    assert refusal(config, model) is None


@on_one_device
@pytest.mark.usefixtures("rank")
def test_adapters_in_layers_are_refused_whose_base_layers_they_change(tmp_path: Path) -> None:
    from vllm.lora import layers  # noqa: PLC0415 - needs vLLM

    from tests.vllm.refused import build  # noqa: PLC0415
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    for name, reason in (("RowParallelLinearWithLoRA", None), ("FusedMoEWithLoRA", "adapters in FusedMoEWithLoRA")):
        known = getattr(layers, name)
        # Of that name, and without what it would make of a layer.
        model.adapted = type(known.__name__, (layers.BaseLayerWithLoRA,), {})()
        found = refusal(config, model)
        assert found is None if reason is None else reason in (found or "")


@on_one_device
@pytest.mark.usefixtures("rank")
def test_attention_that_reads_a_few_of_the_tokens_is_refused_in_models_that_were_not_compared(tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    *_, layer = config.compilation_config.static_forward_context.values()
    layer.impl = type("FlashMLASparseImpl", (), {})()
    assert "not proven with FlashMLASparseImpl, which reads a few" in (refusal(config, model) or "")
    config.model_config.hf_config.model_type = "deepseek_v4"
    assert refusal(config, model) is None


@on_one_device
@pytest.mark.usefixtures("rank")
def test_a_layer_is_refused_by_its_own_cache_and_attention(tmp_path: Path) -> None:
    """A checkpoint or a flag may give some layers another type of cache than the server's."""
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.capabilities import refusal  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    *_, layer = config.compilation_config.static_forward_context.values()
    assert refusal(config, model) is None
    layer.kv_cache_dtype = "int8_per_token_head"
    assert "--kv-cache-dtype int8_per_token_head" in (refusal(config, model) or "")
    layer.kv_cache_dtype = "auto"
    layer.impl = type("NewImpl", (), {})()
    assert "not proven with NewImpl" in (refusal(config, model) or "")


@on_one_device
@pytest.mark.usefixtures("rank")
def test_unknown_places_of_layers_are_refused(tmp_path: Path) -> None:
    from tests.vllm.refused import build  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.adapter import ModelAdapter  # noqa: PLC0415
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    config, model = build("OPTForCausalLM", tmp_path)
    runner = SimpleNamespace(get_model=lambda: model, device="cpu", vllm_config=config)
    with pytest.raises(UnsupportedModelError, match="no decoder layers in OPTForCausalLM"):
        ModelAdapter(runner)


def test_linear_attention_is_refused_and_served(model_folder: Path, tmp_path: Path) -> None:
    from tests.vllm.refused import write_config  # noqa: PLC0415 - needs vLLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / "qwen3-tiny" / name, tmp_path)
    write_config("Qwen3NextForCausalLM", tmp_path)
    # On CPU its layers know no other types.
    flags = ["--enforce-eager", "--enable-poc", "--load-format", "dummy", "--dtype", "bfloat16"]
    flags += ["--mamba-ssm-cache-dtype", "float32"]
    with serving(tmp_path, tmp_path / "server.log", flags) as client:
        with pytest.raises(HTTPError) as refused:
            client.start(params=None, r_target=1.4, seq_len=16)
        answer = json.load(refused.value)
        assert (refused.value.code, answer["reason"]) == (409, "ModelUnsupported")
        assert "layer model.layers.0.linear_attn has no paged KV cache" in answer["detail"]
        if KERNELS_FOR_LINEAR_ATTENTION:
            assert len(client.chat("What is a license?", tokens=3)) == 3
