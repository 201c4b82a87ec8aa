# SPDX-License-Identifier: Apache-2.0
"""The scratch KV cache: PoC's forward pass writes keys, values and states here, never into the chat's blocks.

A pass whose attention reads them straight from the layer has none (``Pass.needs_cache``).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_poc.worker.model.placement import ChainBlocks, Placement

if TYPE_CHECKING:
    from typing import TypeAlias

    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    #: What a layer has: one tensor with the keys and values of all tokens, or its states.
    _Cache: TypeAlias = Tensor | tuple[Tensor, ...]


#: Layers of GLM-5.3 that keep the end of a sequence as states, several tensors of one entry for each sequence.
_STATEFUL = {"Glm5NextLinearAttention"}
#: What specifies a cache of one block for each sequence, whose tokens overwrite each other in turn.
_CIRCULAR = "CircularBufferSpec"
#: The first, which is left empty, and one that all sequences write into.
_STATE_BLOCKS = 2


#: Where specifications of caches and layers keep behind how many tokens they look no further back.
_WINDOWS = ("sliding_window", "attention_chunk_size")
#: Bytes of an int64, how many are summed at a time, and by how many places.
_WORD, _WORDS, _COLUMNS = 8, 2**24, 1024


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

    def positions(self, device: torch.device, before: int = 0) -> Tensor:
        """Return each token's position in its sequence, behind so many others: int64 ``[tokens]``."""
        return torch.arange(before, before + self.seq_len, device=device).repeat(self.nonces)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers with caches of one shape that share a metadata builder.

    ``block_dim`` is the dimension of a layer's ``kv_cache`` that counts blocks, ``block_size`` the number of tokens in
    such a block, and ``page_bytes`` how far apart kernels may expect blocks to begin, which can be more than they hold.
    If ``stateful``, the layers write states for later tokens. A prefill alone has none, and all its sequences write
    into one block. ``kept`` is as in `ChainBlocks`.
    ``borders`` are the numbers of tokens behind which a sequence is treated in another way: blocks, windows, chunks.
    """

    layers: dict[str, Attention]
    builder: AttentionMetadataBuilder[Any]
    block_dim: int
    block_size: int
    page_bytes: int
    stateful: bool = False
    kept: int | None = None
    borders: frozenset[int] = frozenset()

    @property
    def chain_blocks(self) -> ChainBlocks:
        """How chains of the decode scheme have their blocks."""
        return ChainBlocks(self.block_size, self.kept)

    def blocks(self, shape: BatchShape) -> int:
        """Return how many blocks such a batch needs, with the first, which is left empty."""
        return _STATE_BLOCKS if self.stateful else 1 + shape.nonces * -(-shape.seq_len // self.block_size)

    def most_blocks(self, nonces: int, tokens: int) -> int:
        """Return how many blocks hold any batch of up to so many nonces and tokens."""
        # The first is left empty, and each sequence leaves at most one block partly empty.
        return _STATE_BLOCKS if self.stateful else 1 + -(-tokens // self.block_size) + nonces

    def plan(self, shape: BatchShape, positions: Tensor, place: Placement | None = None) -> tuple[Any, Tensor]:
        """Return metadata and slot mapping that put the batch into the blocks from number 1 on, or into its ``place``.

        Block 0 is vLLM's for no block at all: kernels of recurrent states leave it out.
        """
        common = self.common(shape, positions, place)
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        return _owned(metadata, self.builder), common.slot_mapping

    def common(self, shape: BatchShape, positions: Tensor, place: Placement | None) -> CommonAttentionMetadata:
        """Return what all builders of metadata are told of such a batch."""
        table = self._table(shape, place, positions.device)
        places = positions.view(*shape)
        slots = table.gather(1, places // self.block_size) * self.block_size + places % self.block_size
        before = place.before if place is not None else 0
        return _common_metadata(
            shape, before=before, positions=positions, table=table.int(), slot_mapping=slots.flatten()
        )

    def _table(self, shape: BatchShape, place: Placement | None, device: torch.device) -> Tensor:
        if place is not None:
            return self.chain_blocks.table(place, shape.nonces, device)
        width = -(-shape.seq_len // self.block_size)
        table = torch.arange(1, 1 + shape.nonces * width, device=device).view(shape.nonces, width)
        return torch.ones_like(table) if self.stateful else table


def cache_group(runner: GPUModelRunner, group: AttentionGroup) -> CacheGroup:
    """Return what a group of vLLM's model runner has in common. UnsupportedModelError if its caches have no blocks."""
    context = runner.vllm_config.compilation_config.static_forward_context
    layers = {name: context[name] for name in group.layer_names}
    for name, layer in layers.items():
        _require_known_cache(name, layer)
    first, *states = cache_tensors(next(iter(layers.values())).kv_cache)
    spec = group.kv_cache_spec
    if states and not hasattr(group, "kernel_block_stride"):
        raise UnsupportedModelError("PoC knows how vLLM 0.32 keeps states beside keys: serve this model with 0.32.")
    if getattr(group, "kernel_block_stride", 0):
        # Between the kernel's blocks of one of vLLM's and those of the next, the cache counts what other layers keep.
        block_dim, split = 0, spec.block_size // group.kernel_block_size
    else:
        block_dim, split = _block_dim(first, runner.kv_cache_config.num_blocks)
    return CacheGroup(
        layers=layers,
        builder=group.get_metadata_builder(0),
        block_dim=block_dim,
        block_size=spec.block_size // split,
        # Of states only the entries of one sequence need to lie together.
        page_bytes=0 if states else spec.page_size_bytes // split,
        stateful=bool(states),
        kept=_kept(spec, spec.block_size // split, stateful=bool(states)),
        borders=_borders(spec, *layers.values()),
    )


def _kept(spec: object, size: int, *, stateful: bool) -> int | None:
    """Return how many blocks of ``size`` tokens a chain keeps; None if all."""
    if stateful or type(spec).__name__ == _CIRCULAR:
        return 1
    window = getattr(spec, "sliding_window", None)
    # The first token of a window may be the last one of a block.
    return None if not window else 1 + -(-(window - 1) // size)


def _borders(spec: object, *layers: object) -> frozenset[int]:
    """Return the sizes of blocks, windows and chunks. A group has windows of its own, or layers that have some."""
    found = [getattr(spec, "block_size", None)]
    found += [getattr(part, name, None) for part in (spec, *layers) for name in _WINDOWS]
    return frozenset(size for size in found if isinstance(size, int) and size > 0)


class CacheForm(NamedTuple):
    """What the attention kernels see of a KV cache. Layers of equal form and role can share one tensor.

    ``strides`` are in elements. ``role`` is the layer's name without numbers: a layer may have several caches, which
    it reads together.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    role: str

    @classmethod
    def of(cls, name: str, cache: Tensor, group: CacheGroup, blocks: int) -> CacheForm:
        """Return the form of the ``cache`` of the layer ``name`` if it had only ``blocks`` blocks."""
        shape, strides, stride = list(cache.shape), [0] * cache.ndim, 1
        shape[group.block_dim] = blocks
        order = sorted(range(cache.ndim), key=cache.stride)
        for dim in order:
            if dim == group.block_dim and dim == order[-1]:
                stride = max(stride, group.page_bytes // cache.itemsize)
            strides[dim] = stride
            stride *= shape[dim]
        return cls(tuple(shape), tuple(strides), cache.dtype, re.sub(r"\d+", "", name))

    @property
    def nbytes(self) -> int:
        """Memory of a tensor of this form, in bytes."""
        elements = max(size * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return int(self.dtype.itemsize * elements)

    def allocate(self, device: torch.device) -> Tensor:
        """Return zeros of this form."""
        return self.laid(torch.zeros(self.nbytes, dtype=torch.uint8, device=device))

    def laid(self, memory: Tensor) -> Tensor:
        """Return a tensor of this form in ``memory``, which has `nbytes` numbers of type uint8."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides)


class ScratchCache:
    """One scratch tensor for each form of KV cache, shared by all layers of that form.

    A layer writes all keys and values of the batch before it reads them, so no layer needs
    another's. Holds any batch of at most ``max_nonces`` sequences and ``max_tokens`` tokens.
    """

    def __init__(self, groups: Sequence[CacheGroup], *, max_nonces: int, max_tokens: int) -> None:
        self._tensors: dict[CacheForm, Tensor] = {}
        self._layers: list[tuple[Attention, _Cache]] = []
        self._blocks: list[tuple[CacheGroup, int]] = []
        for group in groups:
            blocks = group.most_blocks(max_nonces, max_tokens)
            self._blocks.append((group, blocks))
            for name, layer in group.layers.items():
                shared = [self._shared(name, own, group, blocks) for own in cache_tensors(layer.kv_cache)]
                self._layers.append((layer, tuple(shared) if group.stateful else shared[0]))

    def _shared(self, name: str, own: Tensor, group: CacheGroup, blocks: int) -> Tensor:
        form = CacheForm.of(name, own, group, blocks)
        if form not in self._tensors:
            self._tensors[form] = form.allocate(own.device)
        return self._tensors[form]

    @property
    def storages(self) -> set[int]:
        """Addresses of the memory of the scratch."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()}

    @property
    def nbytes(self) -> int:
        """Device memory that the scratch takes, in bytes."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    @contextmanager
    def bound(self, shape: BatchShape) -> Iterator[None]:
        """Make the layers use the scratch, zeroed, for a batch, and give them back their own caches at the end.

        ValueError if the batch has more blocks than the scratch: kernels would write behind its end.
        """
        for group, blocks in self._blocks:
            if group.blocks(shape) > blocks:
                raise ValueError(
                    f"a batch of {shape.nonces} x {shape.seq_len} tokens takes {group.blocks(shape)} blocks of the "
                    f"scratch KV cache, which has {blocks}: use fewer nonces or a smaller seq_len"
                )
        # Kernels read whole blocks: a NaN that an earlier batch left behind a sequence's end would spread.
        for tensor in self._tensors.values():
            tensor.zero_()
        with bound_caches(self._layers):
            yield


@contextmanager
def bound_caches(layers: Sequence[tuple[Attention, _Cache]]) -> Iterator[None]:
    """Make each layer use the cache beside it, and give the layers back their own at the end."""
    own = [layer.kv_cache for layer, _ in layers]
    try:
        for layer, cache in layers:
            layer.kv_cache = cache
        yield
    finally:
        for (layer, _), cache in zip(layers, own, strict=True):
            layer.kv_cache = cache


class Held(NamedTuple):
    """Where a tensor is, which storage it is a view of, and sums over that; None if it holds nothing for later."""

    address: int
    storage: int
    sums: tuple[int, ...] | None


class ChatMemory:
    """What chat keeps for later tokens: KV caches, and the tensors that attention and its metadata builders hold."""

    #: Parts of names of an implementation's tensors that are written anew within each batch.
    _PASSING = ("workspace", "buf", "scratch", "topk_indices", "num_splits", "_cpu")
    #: A builder writes all its tensors anew for each batch, at the same address, except these: it only reads them.
    _CONSTANT = frozenset(
        {
            *("offsets_buffer", "arange_buffer", "cu_seqlens_q_buffer", "topk_tokens_tensor", "max_model_len_tensor"),
            *("dcp_rank_tensor", "persistent_rswa_window_tensor"),
        }
    )

    def __init__(self, layers: Mapping[str, object], builders: Mapping[str, object]) -> None:
        self._layers = layers
        self._builders = builders

    def held(self) -> dict[str, Held]:
        """Return what is held now, by name."""
        known: dict[int, tuple[int, ...]] = {}  # layers may share memory
        return {
            name: self._seen(tensor, known, passing=self._is_passing(name))
            for name, tensor in self._named()
            if tensor.numel()
        }

    def changes(self, before: Mapping[str, Held], foreign: Collection[int]) -> list[str]:
        """Return the names of what is not as it was ``before``, or is a view of one of the ``foreign`` storages."""
        now = self.held()
        changed = [name for name, held in before.items() if now.get(name) != held]
        return changed + [name for name, held in now.items() if name not in before and held.storage in foreign]

    @staticmethod
    def _seen(tensor: Tensor, known: dict[int, tuple[int, ...]], *, passing: bool) -> Held:
        storage = tensor.untyped_storage().data_ptr()
        if not passing and storage not in known:
            known[storage] = _checksums(tensor)
        return Held(tensor.data_ptr(), storage, None if passing else known[storage])

    def _is_passing(self, name: str) -> bool:
        owner, *parts = name.rpartition(" ")[2].split(".")
        if owner == "builder":
            return self._CONSTANT.isdisjoint(parts)
        return any(passing in part for part in (owner, *parts) for passing in self._PASSING)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers.items():
            parts = {**vars(layer), **vars(layer).get("_buffers", {})}
            yield from _tensors_of(f"{name} ", parts)
            yield from _tensors_of(f"{name} impl.", getattr(getattr(layer, "impl", None), "__dict__", {}))
        for name, builder in self._builders.items():
            yield from _tensors_of(f"{name} builder.", vars(builder))


def _tensors_of(prefix: str, parts: Mapping[str, object], depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among these parts, also those in lists and dictionaries, with their names."""
    for name, value in parts.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif depth and isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from _tensors_of(f"{prefix}{name}.", {str(key): item for key, item in items}, depth - 1)


def _checksums(tensor: Tensor) -> tuple[int, ...]:
    """Return sums over the whole memory behind a tensor; of integers, so that none is lost in rounding.

    A word counts by its place among `_COLUMNS`, so that words which change places show, too.
    """
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole = len(memory) // (_WORD * _COLUMNS) * (_WORD * _COLUMNS)
    weights = 2 * torch.arange(_COLUMNS, device=tensor.device) + 1
    parts = [part.view(-1, _COLUMNS).sum(dim=0) for part in memory[:whole].view(torch.int64).split(_WORDS)]
    rest = memory[whole:].long()
    sums = [(part * weights).sum() for part in parts] + [(rest * weights.repeat(_WORD)[: len(rest)]).sum()]
    return tuple(int(value) for value in torch.stack(sums).tolist())


def _common_metadata(
    shape: BatchShape, *, before: int, positions: Tensor, table: Tensor, slot_mapping: Tensor
) -> CommonAttentionMetadata:
    starts = torch.arange(0, shape.tokens + 1, shape.seq_len, dtype=torch.int32)
    lengths = torch.full((shape.nonces,), before + shape.seq_len, dtype=torch.int32)
    values = {
        "query_start_loc": starts.to(slot_mapping.device),
        "query_start_loc_cpu": starts,
        "seq_lens": lengths.to(slot_mapping.device),
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": shape.nonces,
        "num_actual_tokens": shape.tokens,
        "max_query_len": shape.seq_len,
        "max_seq_len": before + shape.seq_len,
        "block_table_tensor": table,
        "slot_mapping": slot_mapping,
        "causal": True,
        "positions": positions,
        "is_prefilling": torch.full((shape.nonces,), before == 0),
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in known})


def _owned(metadata: Any, builder: object) -> Any:  # noqa: ANN401 - each backend has its own
    """Return metadata that the builder's next call leaves as it is: it may write into tensors that it keeps.

    Those of a CPU are new each time, and FlashAttention's holds its own address there.
    """
    kept = {part.untyped_storage().data_ptr() for part in vars(builder).values() if isinstance(part, Tensor)}
    owned = copy.copy(metadata)
    for name, value in vars(metadata).items():
        if isinstance(value, Tensor) and value.is_cuda and value.untyped_storage().data_ptr() in kept:
            object.__setattr__(owned, name, value.clone())
        elif dataclasses.is_dataclass(value):
            object.__setattr__(owned, name, _owned(value, builder))
    if hasattr(getattr(owned, "prefill_backend", None), "prepare_metadata"):
        # Latent attention of a prompt reads the metadata from this object, of which each builder has but one.
        owned.prefill_backend = copy.copy(owned.prefill_backend)
        owned.prefill_backend.prepare_metadata(owned)
    return owned


def cache_tensors(cache: _Cache) -> Sequence[Tensor]:
    """Return all tensors of a layer's cache."""
    return [cache] if isinstance(cache, Tensor) else cache


def _require_known_cache(name: str, layer: Attention) -> None:
    cache = getattr(layer, "kv_cache", None)
    states = type(layer).__name__ in _STATEFUL and isinstance(cache, tuple)
    if not isinstance(cache, Tensor) and not states:
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
