# SPDX-License-Identifier: Apache-2.0
"""The served model as PoC sees it: its layers, its attention's metadata, its forward pass on given embeddings.

Each of vLLM's internals is looked up by feature, not by version number. One that is not found becomes an
`UnsupportedModelError`, so that a new vLLM release ends in a sentence and not in wrong numbers.

What else reads vLLM's internals is in this package and in `vllm_poc.worker.passes`; docs/develop/porting.md lists all.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_poc.worker.model.ranks import Ranks

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    #: vLLM's own, whose two generations have the same attributes here.
    VllmModelRunner: TypeAlias = GPUModelRunner

#: Hidden states of the last stage, or what another stage hands on, by name.
StageOutput: TypeAlias = Tensor | dict[str, Tensor]

# Where the models keep their decoder layers, first match wins.
_LAYER_PATHS = ("model.layers", "transformer.h", "layers")


class UnsupportedModelError(Exception):
    """One sentence: why PoC cannot run on this model or with these flags, and what to change."""


class BatchShape(NamedTuple):
    """A batch of ``nonces`` sequences of ``seq_len`` tokens each."""

    nonces: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the forward pass."""
        return self.nonces * self.seq_len

    def positions(self, device: torch.device) -> Tensor:
        """Return each token's position in its sequence, int64 ``[tokens]``."""
        return torch.arange(self.seq_len, device=device).repeat(self.nonces)


class AttentionPlan(NamedTuple):
    """What the model is told about a batch: positions ``[tokens]``, and two things by attention layer's name.

    ``slot_mapping`` int64 ``[tokens]`` says where in the KV cache a token's key and value go.
    """

    shape: BatchShape
    positions: Tensor
    metadata: dict[str, Any]
    slot_mapping: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Attention layers of one cache shape that share a metadata builder.

    ``block_dim`` is the dimension of a layer's ``kv_cache`` that counts blocks, ``block_size`` the
    number of tokens in such a block.
    """

    layers: dict[str, Attention]
    builder: AttentionMetadataBuilder[Any]
    block_dim: int
    block_size: int

    def plan(self, shape: BatchShape, positions: Tensor) -> tuple[Any, Tensor]:
        """Return metadata and slot mapping that put the batch into the blocks from number 0 on."""
        nonces, seq_len = shape
        blocks = -(-seq_len // self.block_size)
        table = torch.arange(nonces * blocks, device=positions.device).view(nonces, blocks)
        # Each sequence starts a block, so its first slot is a multiple of the block size.
        slot_mapping = (table[:, :1] * self.block_size + positions.view(nonces, seq_len)).flatten()
        common = _common_metadata(shape, positions=positions, table=table.int(), slot_mapping=slot_mapping)
        return _owned(self.builder.build(common_prefix_len=0, common_attn_metadata=common)), slot_mapping


class ModelAdapter:
    """vLLM's model runner as PoC sees it. UnsupportedModelError if it lacks what PoC needs.

    ``chat_peak`` is what the activations of chat's largest forward pass take, in bytes.
    """

    def __init__(self, runner: GPUModelRunner, chat_peak: int = 0) -> None:
        self.chat_peak = chat_peak
        self.model: nn.Module = runner.get_model()
        self.device: torch.device = runner.device
        self.dtype: torch.dtype = runner.vllm_config.model_config.dtype
        self.stack = _layer_stack(self.model)
        self.groups = [_cache_group(runner, group) for groups in runner.attn_groups for group in groups]
        self.ranks = Ranks()
        self._config = runner.vllm_config

    @property
    def layers(self) -> list[nn.Module]:
        """All decoder layers, with placeholders for those of other stages."""
        return list(self.stack)

    @property
    def own_layers(self) -> list[nn.Module]:
        """The decoder layers of this stage."""
        return [layer for layer in self.stack if not isinstance(layer, PPMissingLayer)]

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, to which it sends each token."""
        return bool(self._config.model_config.get_num_experts())

    @property
    def attention_layers(self) -> dict[str, Attention]:
        """All attention layers of this stage, by vLLM's name."""
        return {name: layer for group in self.groups for name, layer in group.layers.items()}

    @property
    def attention_kernels(self) -> list[str]:
        """Names of the classes that compute attention; those of another GPU or setting round differently."""
        return _class_names(layer.impl for layer in self.attention_layers.values())

    @property
    def expert_kernels(self) -> list[str]:
        """Names of the classes that compute experts; empty without experts, or if they have none of their own."""
        methods = (getattr(module, "quant_method", None) for module in self.model.modules())
        kernels = (getattr(method, "moe_kernel", None) for method in methods)
        return _class_names(kernel.impl.fused_experts for kernel in kernels if kernel is not None)

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe the batch to all attention layers: causal prefill, sequence i in blocks of its own."""
        positions = shape.positions(self.device)
        plan = AttentionPlan(shape, positions, {}, {})
        for group in self.groups:
            metadata, slot_mapping = group.plan(shape, positions)
            plan.metadata.update(dict.fromkeys(group.layers, metadata))
            plan.slot_mapping.update(dict.fromkeys(group.layers, slot_mapping))
        return plan

    def forward(self, inputs: Tensor | None, received: dict[str, Tensor], plan: AttentionPlan) -> StageOutput:
        """Run this stage of the model, on ``inputs`` ``[nonces, seq_len, hidden]`` or what the stage before made.

        Overwrites either. The last stage returns the output of the final norm ``[tokens, hidden]``, the others what
        the next one goes on with.
        """
        # Compiled code expects token ids and knows nothing of the layer hooks.
        context = set_forward_context(
            plan.metadata,
            self._config,
            num_tokens=plan.shape.tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=plan.slot_mapping,
            skip_compiled=True,
        )
        embeddings = inputs.flatten(0, 1) if inputs is not None else None
        with context, model_inputs(self.model, embeddings) as arguments:
            before = IntermediateTensors(received) if received else None
            output = self.model(positions=plan.positions, intermediate_tensors=before, **arguments)
        made: StageOutput = output.tensors if isinstance(output, IntermediateTensors) else output
        return made


def token_embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the layers that look something up by token id; none on the later stages of a pipeline."""
    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]


def takes_embeddings(model: nn.Module) -> bool:
    """Whether the model's forward pass has an argument for embeddings."""
    return "inputs_embeds" in inspect.signature(model.forward).parameters


@contextmanager
def model_inputs(model: nn.Module, embeddings: Tensor | None) -> Iterator[dict[str, Tensor | None]]:
    """Yield the arguments by which one forward pass reads ``embeddings`` ``[tokens, hidden]``.

    None stands for the later stages of a pipeline, which read what the stage before sent.
    A model without an argument for them looks up token 0 everywhere, and while the context lasts its embedding
    layer returns ``embeddings`` instead. What the model does to its own embeddings it then does to these.
    """
    if takes_embeddings(model):
        yield {"input_ids": None, "inputs_embeds": embeddings}
        return
    if embeddings is None:
        yield {"input_ids": None}
        return
    (layer,) = token_embeddings(model)
    with layer.register_forward_hook(lambda *_: embeddings):
        yield {"input_ids": torch.zeros(len(embeddings), dtype=torch.int64, device=embeddings.device)}


def _common_metadata(
    shape: BatchShape, *, positions: Tensor, table: Tensor, slot_mapping: Tensor
) -> CommonAttentionMetadata:
    starts = torch.arange(0, shape.tokens + 1, shape.seq_len, dtype=torch.int32)
    lengths = torch.full((shape.nonces,), shape.seq_len, dtype=torch.int32)
    values = {
        "query_start_loc": starts.to(slot_mapping.device),
        "query_start_loc_cpu": starts,
        "seq_lens": lengths.to(slot_mapping.device),
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": shape.nonces,
        "num_actual_tokens": shape.tokens,
        "max_query_len": shape.seq_len,
        "max_seq_len": shape.seq_len,
        "block_table_tensor": table,
        "slot_mapping": slot_mapping,
        "causal": True,
        "positions": positions,
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in known})


def _owned(metadata: Any) -> Any:  # noqa: ANN401 - each backend has its own
    """Return metadata that the builder's next call leaves as it is: FlashAttention's has one buffer for all."""
    schedule = getattr(metadata, "scheduler_metadata", None)
    if not isinstance(schedule, Tensor) or not schedule.is_cuda:  # the CPU's is a new one, and holds its own address
        return metadata
    return dataclasses.replace(metadata, scheduler_metadata=schedule.clone())


def _layer_stack(model: nn.Module) -> nn.ModuleList:
    roots = [getattr(model, "model", None), model]
    for root in filter(None, roots):
        for path in _LAYER_PATHS:
            found = _submodule(root, path)
            if isinstance(found, nn.ModuleList):
                return found
    places = ", ".join(_LAYER_PATHS)
    raise UnsupportedModelError(
        f"PoC finds no decoder layers in {type(model).__name__} at {places}: serve another model."
    )


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _cache_group(runner: GPUModelRunner, group: AttentionGroup) -> CacheGroup:
    context = runner.vllm_config.compilation_config.static_forward_context
    layers = {name: context[name] for name in group.layer_names}
    for name, layer in layers.items():
        _require_paged_cache(name, layer)
    cache = next(iter(layers.values())).kv_cache
    block_dim, split = _block_dim(cache, runner.kv_cache_config.num_blocks)
    return CacheGroup(
        layers=layers,
        builder=group.get_metadata_builder(0),
        block_dim=block_dim,
        block_size=group.kv_cache_spec.block_size // split,
    )


def _require_paged_cache(name: str, layer: Attention) -> None:
    if not isinstance(getattr(layer, "kv_cache", None), Tensor):
        raise UnsupportedModelError(f"The layer {name} has no paged KV cache: serve a model with attention only.")


def _block_dim(cache: Tensor, num_blocks: int) -> tuple[int, int]:
    """Return which dimension counts blocks, and into how many of them the kernel splits vLLM's block."""
    for dim in (0, 1):
        split, rest = divmod(cache.shape[dim], num_blocks)
        if split and not rest:
            return dim, split
    raise UnsupportedModelError(
        f"PoC does not know the KV cache layout {tuple(cache.shape)} of {num_blocks} blocks: "
        "choose another --attention-backend."
    )


def _class_names(objects: Iterable[object]) -> list[str]:
    return sorted({type(found).__name__ for found in objects})
