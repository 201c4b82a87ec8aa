# SPDX-License-Identifier: Apache-2.0
"""Causal attention over sequences so short that one tile has them whole: no second block of keys, nothing to rescale.

It rounds where FlashAttention does: scores, softmax and sums are float32, the weights get the type of the values before
the second product, and the result is rounded once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

#: The longest sequences that are better computed so. Longer ones fill the tiles of FlashAttention.
LONGEST = 64
_HEAD_DIMS = (16, 32, 64, 128, 256)
#: The least side of a product of matrices.
_LEAST_SIDE = 16
#: Rows of a tile of queries, at most: what 128 threads keep in registers, with others beside them.
_ROWS = 64
#: Rows that four warps multiply at a time on Hopper.
_ROWS_OF_FOUR_WARPS = 64


def is_short(seq_len: int, head_dim: int) -> bool:
    """Whether `attend_short` is faster than FlashAttention for such sequences, for any number of heads."""
    return seq_len <= LONGEST and head_dim in _HEAD_DIMS


def attend_short(query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, seq_len: int, scale: float) -> None:
    """Put the causal attention within each sequence of ``seq_len`` tokens into ``out``.

    ``query`` and ``out`` are ``[sequences * seq_len, q_heads, head_dim]``, ``key`` and ``value``
    ``[sequences * seq_len, kv_heads, head_dim]``, of one 16-bit type and any strides. ``q_heads`` is a multiple of
    ``kv_heads``, head_dim a power of two. What is not `is_short` works up to 128 tokens with heads of up to 128.
    """
    tokens, q_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = q_heads // kv_heads
    side = max(_LEAST_SIDE, triton.next_power_of_2(seq_len))
    heads = min(triton.next_power_of_2(group), max(1, _ROWS // side))
    blocks = triton.cdiv(group, heads)
    grid = (tokens // seq_len * kv_heads * blocks,)  # on one axis, since the others end at 65535
    strides = [stride for tensor in (query, key, value, out) for stride in tensor.stride()]
    sizes = (seq_len, kv_heads, group, blocks, scale * math.log2(math.e))
    tile = {"TOKENS": side, "HEADS": heads, "HEAD_DIM": head_dim}
    warps = 8 if heads * side > _ROWS_OF_FOUR_WARPS else 4
    _attend[grid](query, key, value, out, *strides, *sizes, **tile, num_warps=warps)


@triton.jit
def _places(x, token_stride, head_stride, column_stride, first, token, head, column):
    return x + first * token_stride + (token * token_stride + head * head_stride)[:, None] + column * column_stride


# A program has one sequence and query heads of one key head, stacked: two heads of 32 tokens are 64 rows. Memory is the
# limit. So everything is asked for before anything is waited for, and a program is small enough that others on the same
# multiprocessor load meanwhile; that is worth more than keys and values that all heads of a long sequence share.
@triton.jit
def _attend(
    query,
    key,
    value,
    out,
    query_token,
    query_head,
    query_column,
    key_token,
    key_head,
    key_column,
    value_token,
    value_head,
    value_column,
    out_token,
    out_head,
    out_column,
    seq_len,
    kv_heads,
    group,
    blocks,
    scale,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    block = tl.program_id(0) % blocks
    kv_head = tl.program_id(0) // blocks % kv_heads
    first = (tl.program_id(0) // (blocks * kv_heads)).to(tl.int64) * seq_len
    row = tl.arange(0, HEADS * TOKENS)
    token = row % TOKENS
    member = block * HEADS + row // TOKENS
    head = kv_head * group + member
    other = tl.arange(0, TOKENS)
    column = tl.arange(0, HEAD_DIM)[None, :]
    inside = ((token < seq_len) & (member < group))[:, None]
    known = (other < seq_len)[:, None]
    query = _places(query, query_token, query_head, query_column, first, token, head, column)
    key = _places(key, key_token, key_head, key_column, first, other, kv_head, column)
    value = _places(value, value_token, value_head, value_column, first, other, kv_head, column)
    queries = tl.load(query, mask=inside, other=0.0)
    keys = tl.load(key, mask=known, other=0.0)
    values = tl.load(value, mask=known, other=0.0)
    # Rows behind the sequence's end are later than all of its tokens: this hides them as well.
    scores = tl.where(other[None, :] <= token[:, None], tl.dot(queries, tl.trans(keys)), float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp2(scores * scale - (largest * scale)[:, None])
    result = tl.dot(weights.to(values.dtype), values) * (1.0 / tl.sum(weights, 1))[:, None]
    out = _places(out, out_token, out_head, out_column, first, token, head, column)
    tl.store(out, result.to(queries.dtype), mask=inside)
