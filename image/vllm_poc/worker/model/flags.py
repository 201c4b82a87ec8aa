# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM: those with which PoC is proven, or which it does not feel, and those by which results may differ.

Each setting that may matter is `JUDGED` by its values, or known to be `HARMLESS`. All others have to be off: nobody has
read yet of what a new release adds. A test fails for each setting of a release that is neither.

vLLM sets some of them itself, so they are read of its configuration and not of the command line.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_poc.start_checks import FIRST_RELEASE, LAST_RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from dataclasses import Field

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
#: What changes how a forward pass computes, writes or counts, except what `refusal` knows better.
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
    # Another class may do anything else where it loads a model or runs a batch.
    Judged(
        "parallel_config.worker_cls",
        ("auto", "vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"),
        "PoC is not proven with --worker-cls {value}: start vLLM without it.",
    ),
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


def _names(group: str, names: str) -> frozenset[str]:
    return frozenset(f"{group}.{name}".removeprefix(".") for name in names.split())


#: Parts of the configuration whose settings change how a forward pass is computed, where state lies, or who runs it. A
#: setting of theirs that is neither judged nor harmless is refused. The first is the configuration itself.
GROUPS = frozenset(
    {
        "",
        "model_config",
        "cache_config",
        "parallel_config",
        "parallel_config.eplb_config",
        "attention_config",
        "aux_output_config",
        "offload_config",
        "offload_config.uva",
        "offload_config.prefetch",
        "mamba_config",
        "kernel_config",
        "lora_config",
        "speculative_config",
        "kv_transfer_config",
    }
)
#: Settings of the supported releases that change nothing of what PoC computes and where, or that are judged elsewhere.
HARMLESS: frozenset[str] = frozenset().union(
    # What is compiled and captured, watched, loaded, scheduled or sampled is harmless as a whole: PoC calls the model's
    # own forward pass, uncompiled and in batches of its own, and computes no tokens.
    _names(
        "",
        """
        additional_config compilation_config device_config ec_manager_config engram_config instance_id
        kv_events_config load_config logging_config observability_config optimization_level performance_mode
        profiler_config quant_config reasoning_config scheduler_config shutdown_timeout
        structured_outputs_config watermark_config weight_transfer_config
        """,
    ),
    # Which model is served, and what chat says with it: PoC reads the model that it finds.
    _names(
        "model_config",
        """
        allow_deprecated_quantization allowed_local_media_path allowed_media_domains code_revision
        config_format convert disable_cascade_attn disable_sliding_window dtype enable_cumem_allocator
        enable_nccl_comm_suspend enable_prompt_embeds enable_sleep_mode enable_trace_replay enforce_eager
        generation_config hf_config_path hf_overrides hf_token io_processor_plugin logits_processors
        logprobs_mode max_logprobs max_model_len model model_class_overrides model_impl model_weights
        multimodal_config override_attention_dtype override_generation_config pooler_config
        renderer_num_workers return_sampling_mask revision runner seed served_model_name skip_tokenizer_init
        sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        spec_target_max_model_len tokenizer tokenizer_mode tokenizer_revision trust_remote_code
        use_fp64_gumbel
        """,
    ),
    # How large the cache is, when chat finds a prefix in it, and states of layers with which PoC does not run. The
    # type of the cache is judged in `capabilities`, by layer.
    _names(
        "cache_config",
        """
        block_size cache_dtype enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint
        enable_prefix_caching gpu_memory_utilization hash_block_size is_attention_free
        kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_offloading_backend kv_offloading_size
        mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_page_size_padded mamba_ssm_cache_dtype
        num_gpu_blocks_override prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit
        replayssm_buffer_len skip_page_size_padded sliding_window swa_bounded_replay use_replayssm
        """,
    ),
    # Where ranks are and how they find each other, and what goes with a judged setting that is off.
    _names(
        "parallel_config",
        """
        all2all_backend assigned_physical_gpu_ids cp_kv_cache_interleave_size
        cpu_distributed_timeout_seconds data_parallel_backend data_parallel_external_lb
        data_parallel_hybrid_lb data_parallel_master_ip data_parallel_master_port data_parallel_rank
        data_parallel_rank_local data_parallel_rpc_port data_parallel_size_local dbo_decode_token_threshold
        dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
        disable_custom_all_reduce disable_nccl_for_dp_synchronization distributed_executor_backend
        distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size enable_batch_sharded_sampling
        enable_ep_weight_filter
        enable_shm_tensor_arena fault_tolerance_config is_moe_model master_addr master_port
        max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes
        placement_group rank ray_runtime_env ray_workers_use_nsight sd_worker_cls pipeline_parallel_size
        tensor_parallel_size worker_extension_cls
        """,
    ),
    # When experts move, and how: PoC's tokens do not count, and any placement computes the same.
    _names(
        "parallel_config.eplb_config",
        """
        communicator enable_migration_batching log_balancedness log_balancedness_interval
        num_redundant_experts policy step_interval use_async window_size
        """,
    ),
    # Which attention is taken, and how: its class is judged in `capabilities`, by layer.
    _names(
        "attention_config",
        """
        backend backend_per_kind disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph
        flash_attn_version flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size
        flex_attn_q_block_size minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        use_prefill_decode_attention use_prefill_query_quantization use_trtllm_attention
        """,
    ),
    _names(
        "offload_config.uva",
        "cpu_offload_params",
    ),
    _names(
        "offload_config.prefetch",
        "offload_num_in_group offload_params offload_prefetch_step",
    ),
    # For layers with states, of which PoC runs those of GLM-5.3 alone, which read none of these.
    _names(
        "mamba_config",
        "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds",
    ),
    # Which kernels do the same: PoC runs those that vLLM has taken, and a fused pass is compared with them.
    _names(
        "kernel_config",
        """
        enable_bf16x3_router_gemm enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
        enable_rocm_segmented_attn_autotune ir_op_priority linear_backend linear_backend_per_quant
        moe_backend sparse_indexer_topk_backend
        """,
    ),
    # PoC is of the base model. The classes of adapted layers are judged in `capabilities`.
    _names(
        "lora_config",
        """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras lora_dtype max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
        specialize_active_lora target_modules
        """,
    ),
    # PoC runs the target alone. What drafts is judged in `capabilities`.
    _names(
        "speculative_config",
        """
        attention_backend code_revision disable_eagle_block_drop disable_padded_drafter_batch
        draft_load_config draft_model_config draft_parallel_config draft_sample_method
        draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager
        index_share_for_mtp_iteration kv_cache_dtype max_model_len method model moe_backend
        num_speculative_tokens num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max
        prompt_lookup_min quantization rejection_sample_method revision suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth suffix_decoding_min_token_prob
        synthetic_acceptance_length synthetic_acceptance_rates target_model_config target_parallel_config
        tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction
        """,
    ),
    _names("aux_output_config", "max_bytes"),
    # The connector and its options are judged in `capabilities`.
    _names(
        "kv_transfer_config",
        """
        enable_permute_local_kv engine_id kv_buffer_device kv_buffer_size kv_connector
        kv_connector_extra_config kv_connector_module_path kv_ip kv_load_failure_policy kv_parallel_size
        kv_port kv_rank kv_role
        """,
    ),
)

_KNOWN = HARMLESS | GROUPS | {setting.path for setting in JUDGED}
#: Parts whose class asks the network for a model where it is made without one.
_NEEDS_MODEL = frozenset({"", "model_config", "speculative_config"})


def settings_refusal(config: object) -> str | None:
    """Return the sentence on the first setting with a value that is not proven, or that is not known and not off."""
    for setting in JUDGED:
        value = part(config, setting.path)
        if value is not None and not any(value == proven for proven in setting.proven):
            return setting.refusal.format(value=value)
    unknown = min((path for group in GROUPS for path in _unknown_settings(config, group)), default=None)
    if unknown is None:
        return None
    return (
        f"PoC does not know vLLM's setting {unknown}: leave it at its default, "
        f"or take vLLM {FIRST_RELEASE} to {LAST_RELEASE}."
    )


def _unknown_settings(config: object, group: str) -> Iterator[str]:
    """Yield those of a part of the configuration that are neither judged nor harmless, and not at their defaults."""
    owner = part(config, group) if group else config
    if not is_dataclass(owner) or isinstance(owner, type):
        return
    for field in fields(owner):
        path = f"{group}.{field.name}".removeprefix(".")
        # What nobody can set is vLLM's own record.
        if not field.init or field.name.startswith("_") or path in _KNOWN:
            continue
        if getattr(owner, field.name) != _default(owner, field, alone=group in _NEEDS_MODEL):
            yield path


def _default(owner: object, field: Field[Any], *, alone: bool) -> object:
    """Return what a setting is where nobody has set it: what its class makes of it, or its own default if ``alone``."""
    if not alone:
        with suppress(Exception):  # one that has to be told something
            return getattr(type(owner)(), field.name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


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
