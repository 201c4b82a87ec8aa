# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM: those with which PoC is not proven, and those by which results of two servers may differ.

vLLM sets some of them itself, so they are read of its configuration and not of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


class Judged(NamedTuple):
    """A setting of which all values but the ``proven`` are refused, by a sentence with the ``{value}``.

    A release that has no such setting has it off. So has one that calls it otherwise, which a test would see.
    """

    path: str
    proven: tuple[object, ...]
    refusal: str

    @classmethod
    def off(cls, path: str, flag: str, why: str = "") -> Judged:
        """Judge a feature that has to be off; ``why``, where it is more than that nobody has proven it."""
        reason = f"{why}: start vLLM without {flag}." if why else f"is not proven with {flag}: start vLLM without it."
        return cls(path, (False,), f"PoC {reason}")

    @classmethod
    def of_ranks(cls, path: str, flag: str) -> Judged:
        """Judge a way to spread work over ranks by which they would not do the same."""
        return cls(
            path, (1,), f"PoC would not run the same on all ranks: start vLLM with {flag} 1 instead of {{value}}."
        )


_IN_CPU_MEMORY = "is not proven with weights in the CPU's memory"
#: What changes how a forward pass computes, writes or counts, except what `refusal` knows better. A new feature of vLLM
#: is no part of it until somebody has read of it, but a new value of one of these is refused.
JUDGED = (
    Judged.of_ranks("parallel_config.data_parallel_size", "--data-parallel-size"),
    Judged.of_ranks("parallel_config.decode_context_parallel_size", "--decode-context-parallel-size"),
    Judged.of_ranks("parallel_config.prefill_context_parallel_size", "--prefill-context-parallel-size"),
    *(
        Judged(
            f"parallel_config.{name}",
            (False, True),
            f"PoC is not proven with --{name.replace('_', '-')} {{value}}: start vLLM without it.",
        )
        for name in ("enable_expert_parallel", "enable_eplb")
    ),
    Judged(
        "parallel_config.expert_placement_strategy",
        ("linear",),
        "PoC is not proven with --expert-placement-strategy {value}: start vLLM without it.",
    ),
    Judged.off("parallel_config.enable_elastic_ep", "--enable-elastic-ep"),
    Judged.off("parallel_config.enable_fault_tolerance", "--enable-fault-tolerance"),
    Judged.off("parallel_config.enable_dbo", "--enable-dbo"),
    Judged(
        "parallel_config.ubatch_size", (0, 1), "PoC is not proven with --ubatch-size {value}: start vLLM without it."
    ),
    Judged.off("parallel_config.enable_hc_sp", "--enable-hc-sp"),
    Judged(
        "model_config.quantization",
        (None, "fp8", "deepseek_v4_fp8"),
        "PoC is not proven with weights of the quantization {value}: "
        "serve the model unquantized, or with vLLM's quantization fp8.",
    ),
    # By it, vLLM also quantizes the layers that a checkpoint has left as they are.
    Judged(
        "model_config.quantization_config",
        (None,),
        "PoC is not proven with --quantization-config: start vLLM without it.",
    ),
    Judged(
        "offload_config.offload_backend",
        ("auto", "uva", "prefetch"),
        "PoC is not proven with --offload-backend {value}: start vLLM without it.",
    ),
    Judged.off("offload_config.uva.cpu_offload_gb", "--cpu-offload-gb", _IN_CPU_MEMORY),
    Judged.off("offload_config.prefetch.offload_group_size", "--offload-group-size", _IN_CPU_MEMORY),
    Judged(
        "cache_config.kv_cache_layout",
        ("NHD", "HND", "LBNHC", "LBHNC", "BLNHC", "BLHNC"),
        "PoC is not proven with VLLM_KV_CACHE_LAYOUT={value}: start vLLM without it.",
    ),
    Judged.off("cache_config.calculate_kv_scales", "--calculate-kv-scales", "results would depend on the first chat"),
    Judged.off("cache_config.kv_sharing_fast_prefill", "--kv-sharing-fast-prefill"),
    # From 0.24 to 0.27 the default is bf16, which MiniMax-M3 alone reads. Later releases take it for no other model.
    Judged(
        "attention_config.indexer_kv_dtype",
        ("auto", "bf16"),
        "PoC is not proven with indexer_kv_dtype {value}: leave it out of --attention-config.",
    ),
    *(
        Judged.off(f"attention_config.{name}", f"{name} in --attention-config")
        for name in ("indexer_sparse_logits", "use_fp4_indexer_cache", "hisparse_config", "use_non_causal")
    ),
    *(
        Judged.off(
            f"{part}.enable_return_routed_experts",
            "--enable-return-routed-experts",
            "has batches that it cannot record",
        )
        for part in ("model_config", "aux_output_config")
    ),
    Judged.off("ec_transfer_config", "--ec-transfer-config"),
    Judged.off("diffusion_config", "--diffusion-config"),
)


def settings_refusal(config: object) -> str | None:
    """Return the sentence on the first of the `JUDGED` settings that has another value than those that are proven."""
    for setting in JUDGED:
        value = part(config, setting.path)
        if value is not None and not any(value == proven for proven in setting.proven):
            return setting.refusal.format(value=value)
    return None


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
