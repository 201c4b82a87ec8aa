# SPDX-License-Identifier: Apache-2.0
"""What the server's configuration allows PoC, and why it may forbid it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm import envs
from vllm_poc.maths.decode import PICKED_COORDINATES
from vllm_poc.rpc import DecodeSetup, ModelFacts
from vllm_poc.worker.model.adapter import ModelAdapter, takes_embeddings, token_embeddings, token_vocabulary
from vllm_poc.worker.model.base_model import adapted_layers
from vllm_poc.worker.model.flags import part, result_flags, settings_refusal

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, SpeculativeConfig, VllmConfig

#: Speculative decoding whose drafts come from no model, so that nothing but the target's own forward pass runs.
_DRAFTS_WITHOUT_MODEL = {"ngram"}
#: Models of layers that draft behind the target (method ``mtp``) and leave what it computes as it is.
_COMPARED_DRAFT_LAYERS = {"DeepSeekMTPModel", "Glm4MoeMTPModel", "MiMoMTPModel"}
#: KV connectors beside which chat and PoC have been compared with a server that has none, each with the options that it
#: had then, and the one that has several. The last two keep chat's blocks in the CPU's memory.
_COMPARED_CONNECTORS = {
    "ExampleConnector": {"shared_storage_path"},
    "OffloadingConnector": {"cpu_bytes_to_use"},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use"},
}
_CONNECTOR_OF_SEVERAL = "MultiConnector"
#: Layers with adapters (``--enable-lora``) whose base layers are left as they were.
_COMPARED_ADAPTED = {
    "ColumnParallelLinearWithLoRA",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "VocabParallelEmbeddingWithLoRA",
}
#: Types of models with positions of several dimensions (M-RoPE) whose results were compared with the engine's.
_COMPARED_DIMENSIONS = {"qwen2_5_vl"}
#: GLM-5.3. Its results have been compared with the engine's on a GPU only as the network serves it, and with a cache of
#: 16 bits: with other kernels of linear attention a pass has read memory that is not its own.
_GLM_5_3 = {"glm5_next", "glm5_next_text"}
_16_BITS = {"auto", "bfloat16"}
#: Attention whose only memory of earlier tokens is its layer's ``kv_cache``, by the class of the layer's ``impl``. Flex
#: attention is no part of it: its masks are made for as many blocks as chat's cache has.
_GENERAL = {"CPUAttentionBackendImpl", "FlashAttentionImpl", "FlashInferImpl", "TritonAttentionImpl"}
_LATENT = {"CPUMLAImpl", "CutlassMLAImpl", "FlashInferMLAImpl", "FlashMLAImpl", "TritonMLAImpl"}
_SPARSE = {"FlashInferMLASparseImpl", "FlashInferMLASparseSM90Impl", "FlashMLASparseImpl"}
_SPARSE_16_BITS = {"FlashAttnMLASparseImpl"}
_16_BITS_ONLY = {"AMXMLAImpl", "FlashAttnMLAImpl"} | _SPARSE_16_BITS
#: Types of models with which the sparse ones have been compared.
_COMPARED_SPARSE = {"deepseek_v4"} | _GLM_5_3
#: Layers with such an ``impl``: others do more than it, such as sinks in chat's cache or queries that see what follows.
_COMPARED_LAYERS = {"Attention", "MLAAttention"}
_CAUSAL = "decoder"
#: Layers without an ``impl``: caches of an index, and those of DeepSeek-V4 and GLM-5.3.
_LAYERS = {
    "CompressorStateCache",
    "DeepseekV32IndexerCache",
    "DeepseekV4IndexerCache",
    "DeepseekV4SWACache",
    "DeepseekV4CPUAttention",
    "DeepseekV4CPUIndexerCache",
    "DeepseekV4FlashInferMLAAttention",
    "DeepseekV4FlashMLAAttention",
    "Glm5NextIndexerCache",
    "Glm5NextTailCache",
}
_ANY_16_BITS = frozenset(_GENERAL | _LATENT | _SPARSE | _16_BITS_ONLY | _LAYERS)
_FP8 = frozenset(_GENERAL | _LATENT | _SPARSE | _LAYERS)
_NONE = frozenset[str]()
#: The attention that PoC runs over each type of cache that a supported release knows. None where the attention holds
#: views of chat's scales beside ``kv_cache``, or where its packed values have not been compared with the engine's.
ATTENTION_BY_CACHE_DTYPE = {
    "auto": _ANY_16_BITS,
    "float16": _ANY_16_BITS,
    "bfloat16": _ANY_16_BITS,
    "fp8": _FP8,
    "fp8_e4m3": _FP8,
    "fp8_e5m2": frozenset(_GENERAL - {"FlashAttentionImpl"}),
    "fp8_ds_mla": frozenset(_SPARSE | _LAYERS),
    "fp8_inc": _NONE,
    "nvfp4_ds_mla": _NONE,
    "turboquant_k8v4": _NONE,
    "turboquant_4bit_nc": _NONE,
    "turboquant_k3v4_nc": _NONE,
    "turboquant_3bit_nc": _NONE,
    "ultraquant_4bit": _NONE,
    "int4_per_token_head": _NONE,
    "int8_per_token_head": _NONE,
    "fp8_per_token_head": _NONE,
    "nvfp4": _NONE,
    "nvfp4_4over6": _NONE,
}
#: Of the first, results do not depend on the batch; the second's memory is shared, which graphs would take.
_OWN_OPERATIONS = ("VLLM_BATCH_INVARIANT", "VLLM_USE_NCCL_SYMM_MEM")
#: Types of models whose chains of decode steps have been compared with another implementation, step by step. All others
#: are refused: a chain that goes wrong somewhere still looks like a chain.
_COMPARED_CHAINS = {"qwen3", "qwen3_moe", "minimax_m2", "deepseek_v4"} | _GLM_5_3
#: Attention that has been compared where sequences go on, by the class of the layer's ``impl``, or of the layer.
_COMPARED_STEPS = {
    "CPUAttentionBackendImpl",
    "CompressorStateCache",
    "DeepseekV4CPUAttention",
    "DeepseekV4CPUIndexerCache",
    "DeepseekV4FlashMLAAttention",
    "DeepseekV4IndexerCache",
    "DeepseekV4SWACache",
    "FlashAttentionImpl",
    "FlashAttnMLASparseImpl",
    "Glm5NextIndexerCache",
    "Glm5NextLinearAttention",
    "Glm5NextTailCache",
}
#: Tokens of a batch beyond which no GPU computes faster; each of many experts gets only a few of them.
_MOST_TOKENS, _MOST_TOKENS_OF_EXPERTS = 8192, 32_768


def model_facts(config: VllmConfig) -> ModelFacts:
    """Return the sizes of the served model and of the largest PoC batch, without scratch cache and refusal.

    vLLM has sized the workspaces of experts and attention for the same largest batch and then locked them, so
    its own forward pass needs no others.
    """
    return ModelFacts(
        hidden_size=config.model_config.get_hidden_size(),
        num_layers=config.model_config.get_total_num_hidden_layers(),
        max_model_len=config.model_config.max_model_len,
        max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
        max_batch_nonces=config.scheduler_config.max_num_seqs,
        max_captured_tokens=0,
        max_captured_nonces=0,
        scratch_bytes=0,
        fused=False,
        stages=config.parallel_config.pipeline_parallel_size,
        attention=[],
        experts=[],
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        quantization=str(config.model_config.quantization or ""),
        flags=result_flags(config),
        findings=[],
        refusal=None,
    )


def fused_facts(facts: ModelFacts, *, experts: bool, cached: bool, larger: bool = True) -> ModelFacts:
    """Return the same for the fused pass, of which larger ones than vLLM's can be captured, where it takes ``larger``.

    One with a cache (``cached``) has no more sequences than vLLM's: its attention has room to schedule so many.
    """
    most = _MOST_TOKENS_OF_EXPERTS if experts else _MOST_TOKENS
    tokens = max(facts["max_batch_tokens"], most if larger else 0)
    nonces = facts["max_batch_nonces"] if cached else tokens
    return {**facts, "max_captured_tokens": tokens, "max_captured_nonces": nonces}


def needs_vllms_operations() -> bool:
    """Whether vLLM's settings ask for operations that only its own forward pass has."""
    return any(getattr(envs, name, False) for name in _OWN_OPERATIONS)


def refusal(config: VllmConfig, model: nn.Module) -> str | None:
    """Return one sentence that says why PoC cannot run with this configuration and model, or None."""
    return (
        settings_refusal(config)
        or _drafts_refusal(config.speculative_config)
        or _connector_refusal(config.kv_transfer_config)
        or _adapters_refusal(model)
        or _cache_refusal(config)
        or _model_refusal(config, model)
        or _attention_refusal(config)
    )


def decode_refusal(adapter: ModelAdapter, facts: ModelFacts, setup: DecodeSetup, *, proven: bool = True) -> str | None:
    """Return one sentence that says why the decode scheme cannot run here, or None; the one place that decides it.

    If not ``proven``, servers are taken whose chains have not been compared with others.
    """
    if facts["hidden_size"] < PICKED_COORDINATES:
        return (
            f"The decode scheme picks {PICKED_COORDINATES} coordinates, and the model's hidden size is "
            f"{facts['hidden_size']}: serve a larger model."
        )
    if adapter.ranks.stages > 1:
        return "The decode scheme does not run in a pipeline: start vLLM without --pipeline-parallel-size."
    return _setup_refusal(setup) or (_chains_refusal(adapter) if proven else None)


def _setup_refusal(setup: DecodeSetup) -> str | None:
    if setup["codebook"] is None and not setup["rebuild"]:
        return "The decode scheme needs the network's codebook: give the path of its sphere_codebook.pt."
    if setup["reserve_bytes"] <= 0:
        return "The decode scheme needs memory for keys and values: set some aside."
    return None


def _chains_refusal(adapter: ModelAdapter) -> str | None:
    if adapter.model_type not in _COMPARED_CHAINS:
        return f"The decode scheme is not proven with {adapter.model_type or 'this model'}: serve another model."
    unknown = set(adapter.attention_kernels) - _COMPARED_STEPS
    if unknown:
        return f"The decode scheme is not proven with {min(unknown)}: choose another --attention-backend."
    return None


def unproven(config: VllmConfig) -> str | None:
    """Return one sentence that says that this type of model is for tests alone as it is served, or None."""
    if _model_type(config.model_config) not in _GLM_5_3:
        return None
    linear = dict(config.additional_config or {}).get("kda_prefill_backend")
    if linear == "triton" and part(config, "attention_config.sparse_mla_force_mqa"):
        return None
    return (
        "PoC's results of GLM-5.3 have been compared with those of vLLM's engine only for the attention that the "
        "network asks for: start vLLM with --kda-prefill-backend triton "
        """--attention-config '{"sparse_mla_force_mqa": true}'."""
    )


def _model_type(kind: ModelConfig) -> str | None:
    return getattr(kind.hf_config, "model_type", None)


def _drafts_refusal(speculative: SpeculativeConfig | None) -> str | None:
    method = getattr(speculative, "method", None)
    if method is None or method in _DRAFTS_WITHOUT_MODEL:
        return None
    models = part(speculative, "draft_model_config.hf_config.architectures") if method == "mtp" else None
    drafts = models[0] if isinstance(models, list) and models else method
    if drafts in _COMPARED_DRAFT_LAYERS:
        return None
    return (
        f"PoC is not proven beside the drafts of {drafts}: "
        'start vLLM without --speculative-config, or with "method": "ngram".'
    )


def _connector_refusal(transfer: KVTransferConfig | None) -> str | None:
    for connector, module, options in _connectors(vars(transfer) if transfer is not None else {}):
        named = f"{connector} of {module}" if module is not None else connector
        proven = _COMPARED_CONNECTORS.get(connector) if module is None else None
        if proven is not None and not options <= proven:
            named, proven = f"{named} with {min(options - proven)}", None
        if proven is None:
            return (
                f"PoC is not proven beside the KV connector {named}: "
                "start vLLM without --kv-transfer-config, or with --kv-offloading-size alone."
            )
    return None


def _connectors(transfer: Mapping[str, Any]) -> Iterator[tuple[str, str | None, set[str]]]:
    """Yield the names of the KV connectors, of the modules of those that are not vLLM's own, and of their options."""
    connector, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    options = transfer.get("kv_connector_extra_config") or {}
    several = options.get("connectors")
    if several and (connector, module) == (_CONNECTOR_OF_SEVERAL, None):
        for one in several:
            yield from _connectors(one)
    elif transfer:
        yield str(connector), module, set(options)


def _adapters_refusal(model: nn.Module) -> str | None:
    unknown = {type(part.layer).__name__ for part in adapted_layers(model)} - _COMPARED_ADAPTED
    if not unknown:
        return None
    return f"PoC is not proven beside adapters in {min(unknown)}: start vLLM without --enable-lora."


def _cache_refusal(config: VllmConfig) -> str | None:
    dtype = config.cache_config.cache_dtype
    if _model_type(config.model_config) in _GLM_5_3 and dtype not in _16_BITS:
        return f"PoC is not proven for this model with --kv-cache-dtype {dtype}: start vLLM with --kv-cache-dtype auto."
    # In the scratch cache, a layer that reads another layer's keys would find those of the layer that wrote last.
    for name, layer in config.compilation_config.static_forward_context.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            return f"The layer {name} reads another's KV cache: serve another model."
    return None


def _attention_refusal(config: VllmConfig) -> str | None:
    for layer in config.compilation_config.static_forward_context.values():
        # Experts are listed here too; what keeps states is for `cache_group` to know.
        if isinstance(layer, AttentionLayerBase) and not isinstance(layer, MambaBase):
            dtype = getattr(layer, "kv_cache_dtype", config.cache_config.cache_dtype)
            name = type(getattr(layer, "impl", layer)).__name__
            reason = (
                attention_refusal(dtype, name) or _layer_refusal(layer) or _sparse_refusal(config.model_config, name)
            )
            if reason is not None:
                return reason
    return None


def _layer_refusal(layer: AttentionLayerBase) -> str | None:
    kind, sees = type(layer).__name__, getattr(layer, "attn_type", _CAUSAL)
    if hasattr(layer, "impl") and kind not in _COMPARED_LAYERS:
        return f"PoC is not proven with {kind}: serve another model."
    if sees != _CAUSAL:
        return f"PoC is not proven with attention of type {getattr(sees, 'value', sees)}: serve another model."
    return None


def _sparse_refusal(kind: ModelConfig, attention: str) -> str | None:
    if attention not in _SPARSE | _SPARSE_16_BITS or _model_type(kind) in _COMPARED_SPARSE:
        return None
    return f"PoC is not proven with {attention}, which reads a few of the tokens only: serve another model."


def attention_refusal(dtype: str, attention: str) -> str | None:
    """Return why PoC does not run the class ``attention`` over a KV cache of this ``--kv-cache-dtype``, or None."""
    known = ATTENTION_BY_CACHE_DTYPE.get(dtype, _NONE)
    if not known:
        return (
            f"PoC is not proven to leave chat's KV cache alone with --kv-cache-dtype {dtype}: "
            "start vLLM with --kv-cache-dtype auto or fp8."
        )
    if attention not in known:
        return (
            f"PoC is not proven with {attention} over a KV cache of type {dtype}: "
            "choose another --attention-backend, or --kv-cache-dtype auto."
        )
    return None


def _model_refusal(config: VllmConfig, model: nn.Module) -> str | None:
    kind, called = config.model_config, type(model).__name__
    if kind.runner_type != "generate":
        return f"{called} generates nothing under --runner {kind.runner_type}: serve it for chat."
    if kind.is_encoder_decoder:
        return f"{called} reads the output of an encoder, which PoC has not: serve a model with a decoder only."
    # Releases before the two were made one tell them apart.
    several = kind.uses_mrope and _model_type(kind) not in _COMPARED_DIMENSIONS
    if several or getattr(kind, "uses_xdrope_dim", 0):
        return f"{called} has positions of several dimensions, with which PoC is not proven: serve another model."
    if token_vocabulary(kind) is None and any(
        _routes_by_token(name, values, kind.get_vocab_size()) for name, values in model.named_parameters()
    ):
        return f"{called} routes experts by token id, and PoC has no tokens: serve another model."
    if _reads_tokens(model):
        return f"{called} reads more of the tokens than one embedding each, and PoC has no tokens: serve another model."
    return None


def _routes_by_token(name: str, values: nn.Parameter, vocabulary: int) -> bool:
    # A quantised router holds integers too, but not a row for each token.
    return ".gate." in name and not values.is_floating_point() and values.shape[:1] == (vocabulary,)


def _reads_tokens(model: nn.Module) -> bool:
    embeddings = len(token_embeddings(model))
    missing = embeddings == 0 and get_pp_group().is_first_rank and not takes_embeddings(model)
    # vLLM hands such models the tokens beside their embeddings, or has code of their own prepare their inputs.
    fed_apart = getattr(model, "requires_raw_input_tokens", False) or hasattr(model, "get_model_state_cls")
    return fed_apart or embeddings > 1 or missing
