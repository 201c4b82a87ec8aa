# SPDX-License-Identifier: Apache-2.0
"""Over which KV caches, and with which attention, PoC runs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm.config import VllmConfig
from vllm.config.cache import CacheDType

from vllm_poc.worker.model.capabilities import ATTENTION_BY_CACHE_DTYPE, attention_refusal
from vllm_poc.worker.model.flags import GROUPS, HARMLESS, JUDGED, settings_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_each_type_of_cache_of_the_release_is_decided() -> None:
    """One that a new release adds is refused until somebody decides."""
    assert set(get_args(CacheDType)) - ATTENTION_BY_CACHE_DTYPE.keys() == set()


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("auto", "CPUAttentionBackendImpl"),
        ("auto", "FlashAttentionImpl"),
        ("bfloat16", "FlashAttnMLAImpl"),
        ("fp8", "FlashAttentionImpl"),
        ("fp8_e4m3", "FlashInferImpl"),
        ("fp8_ds_mla", "DeepseekV4FlashMLAAttention"),
    ],
)
def test_what_is_proven_runs(dtype: str, attention: str) -> None:
    assert attention_refusal(dtype, attention) is None


WITHOUT_ATTENTION = sorted(dtype for dtype, known in ATTENTION_BY_CACHE_DTYPE.items() if not known)
ATTENTION = sorted({name for known in ATTENTION_BY_CACHE_DTYPE.values() for name in known})


def test_caches_with_scales_beside_them_and_packed_ones_have_no_attention() -> None:
    assert {"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "fp8_inc"} <= set(
        WITHOUT_ATTENTION
    )


@pytest.mark.parametrize("dtype", [*WITHOUT_ATTENTION, "new_dtype"])
def test_a_cache_that_nothing_is_proven_over_is_refused_whatever_the_attention(dtype: str) -> None:
    for attention in (*ATTENTION, "NewImpl"):
        assert attention_refusal(dtype, attention) == (
            f"PoC is not proven to leave chat's KV cache alone with --kv-cache-dtype {dtype}: "
            "start vLLM with --kv-cache-dtype auto or fp8."
        )


@pytest.mark.parametrize("dtype", sorted(ATTENTION_BY_CACHE_DTYPE.keys() - set(WITHOUT_ATTENTION)))
def test_over_every_other_cache_what_is_not_listed_is_refused(dtype: str) -> None:
    for attention in {*ATTENTION, "NewImpl"} - ATTENTION_BY_CACHE_DTYPE[dtype]:
        reason = attention_refusal(dtype, attention)
        assert reason is not None
        assert f"{attention} over a KV cache of type {dtype}: choose another" in reason


@pytest.mark.parametrize(
    ("dtype", "attention"), [("auto", "NewImpl"), ("auto", "FlexAttentionImpl"), ("fp8", "FlashAttnMLAImpl")]
)
def test_attention_that_is_not_on_the_list_is_refused(dtype: str, attention: str) -> None:
    assert attention_refusal(dtype, attention) == (
        f"PoC is not proven with {attention} over a KV cache of type {dtype}: "
        "choose another --attention-backend, or --kv-cache-dtype auto."
    )


#: What PoC asks of vLLM's settings, by their place, and a part of the sentence on a value that it does not know.
SETTINGS = {
    "parallel_config.data_parallel_size": "--data-parallel-size 1",
    "parallel_config.decode_context_parallel_size": "--decode-context-parallel-size 1",
    "parallel_config.prefill_context_parallel_size": "--prefill-context-parallel-size 1",
    "parallel_config.enable_expert_parallel": "--enable-expert-parallel",
    "parallel_config.enable_eplb": "--enable-eplb",
    "parallel_config.expert_placement_strategy": "--expert-placement-strategy",
    "parallel_config.enable_elastic_ep": "--enable-elastic-ep",
    "parallel_config.enable_fault_tolerance": "--enable-fault-tolerance",
    "parallel_config.enable_dbo": "--enable-dbo",
    "parallel_config.ubatch_size": "--ubatch-size",
    "parallel_config.enable_hc_sp": "--enable-hc-sp",
    "parallel_config.worker_cls": "--worker-cls",
    "model_config.quantization": "quantization",
    "model_config.quantization_config": "--quantization-config",
    "model_config.enable_return_routed_experts": "--enable-return-routed-experts",
    "aux_output_config.enable_return_routed_experts": "--enable-return-routed-experts",
    "offload_config.offload_backend": "--offload-backend",
    "offload_config.uva.cpu_offload_gb": "--cpu-offload-gb",
    "offload_config.prefetch.offload_group_size": "--offload-group-size",
    "cache_config.kv_cache_layout": "VLLM_KV_CACHE_LAYOUT",
    "cache_config.calculate_kv_scales": "--calculate-kv-scales",
    "cache_config.kv_sharing_fast_prefill": "--kv-sharing-fast-prefill",
    "attention_config.indexer_kv_dtype": "indexer_kv_dtype",
    "attention_config.indexer_sparse_logits": "indexer_sparse_logits",
    "attention_config.use_fp4_indexer_cache": "use_fp4_indexer_cache",
    "attention_config.hisparse_config": "hisparse_config",
    "attention_config.use_non_causal": "use_non_causal",
    "ec_transfer_config": "--ec-transfer-config",
    "diffusion_config": "--diffusion-config",
}
UNKNOWN = ("a_new_value", 7, 0.5, SimpleNamespace(kind="new"))


def configured(path: str, value: object) -> object:
    """Return a configuration in which this is all that is set."""
    for name in reversed(path.split(".")):
        value = SimpleNamespace(**{name: value})
    return value


@pytest.mark.parametrize("path", sorted(setting.path for setting in JUDGED))
def test_a_value_that_nobody_has_proven_is_refused_by_name(path: str) -> None:
    """Whatever it is: a feature may become one of several kinds in the next release."""
    is_number = any(1 in setting.proven for setting in JUDGED if setting.path == path)
    for value in (*UNKNOWN, 2 if is_number else True):
        reason = settings_refusal(configured(path, value)) or ""
        assert reason.startswith("PoC ")
        assert SETTINGS[path] in reason
        assert reason.count(": ") == 1, "what is wrong, and what to do about it"


def proven() -> Iterator[tuple[str, object]]:
    """Return each value that is proven, and those that stand for a setting which is off or which a release lacks."""
    for setting in JUDGED:
        yield from ((setting.path, value) for value in (*setting.proven, None))


def test_what_is_proven_and_what_a_release_lacks_runs() -> None:
    assert [case for case in proven() if settings_refusal(configured(*case)) is not None] == []
    assert settings_refusal(SimpleNamespace()) is None


@pytest.mark.parametrize(("path", "default"), [("attention_config.indexer_kv_dtype", "bf16")])
def test_what_an_older_release_has_by_default_runs(path: str, default: object) -> None:
    assert settings_refusal(configured(path, default)) is None


def group_of(release: Any, group: str) -> Any:  # noqa: ANN401 - a part of vLLM's configuration
    """Return the class of a part of the configuration that the release has, or None."""
    kind = release
    for name in group.split(".") if group else []:
        types = {field.name: field.type for field in dataclasses.fields(kind)} if kind is not None else {}
        options = get_args(types.get(name)) or (types.get(name),)
        kind = next((option for option in options if dataclasses.is_dataclass(option)), None)
    return kind


def extended(group: str, default: object, value: object) -> object:
    """Return a configuration whose ``group`` has got a setting that no release has, with this value."""
    kind = dataclasses.make_dataclass("Extended", [("a_new_feature", Any, dataclasses.field(default=default))])
    return configured(group, kind(value)) if group else kind(value)


@pytest.mark.parametrize("group", sorted(GROUPS))
@pytest.mark.parametrize(("default", "value"), [(False, True), (None, "on"), ("auto", "new"), (1, 2), ((), ("x",))])
def test_a_setting_that_nobody_has_read_of_is_refused_by_name(group: str, default: object, value: object) -> None:
    path = f"{group}.a_new_feature".removeprefix(".")
    assert settings_refusal(extended(group, default, default)) is None
    reason = settings_refusal(extended(group, default, value)) or ""
    assert reason.startswith(f"PoC does not know vLLM's setting {path}: leave it at its default, or take vLLM ")


def test_a_value_that_vllm_computes_itself_is_no_setting() -> None:
    """Also where it differs from what the class says: as a number of ranks that was None."""

    @dataclasses.dataclass
    class Computed:
        a_new_size: int | None = None
        of_vllms_own: int = dataclasses.field(default=0, init=False)
        _hidden: int = 0

        def __post_init__(self) -> None:
            self.a_new_size = self.a_new_size or 8

    part = Computed()
    part.of_vllms_own, part._hidden = 7, 7
    assert settings_refusal(configured("parallel_config", part)) is None
    part.a_new_size = 4
    assert "parallel_config.a_new_size" in (settings_refusal(configured("parallel_config", part)) or "")


def test_no_model_is_looked_up_for_what_a_setting_is_by_default() -> None:
    @dataclasses.dataclass
    class Model:
        model: str = "of/the-hub"
        a_new_feature: bool = False

        def __post_init__(self) -> None:
            assert self.model != "of/the-hub"

    assert settings_refusal(configured("model_config", Model("mine"))) is None
    assert "a_new_feature" in (settings_refusal(configured("model_config", Model("mine", a_new_feature=True))) or "")


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_each_setting_of_the_release_is_decided(group: str) -> None:
    """A setting that a new release adds is refused where it is on, until somebody has read of it."""
    kind = group_of(VllmConfig, group)
    if kind is None:
        pytest.skip("this release has no such part")
    judged = {setting.path for setting in JUDGED}
    paths = {f"{group}.{field.name}".removeprefix(".") for field in dataclasses.fields(kind) if field.init}
    unknown = {path for path in paths - judged - HARMLESS if not path.rpartition(".")[2].startswith("_")}
    assert unknown - GROUPS == set()


def test_no_setting_is_both_judged_and_harmless() -> None:
    assert {setting.path for setting in JUDGED} & HARMLESS == set()
