# SPDX-License-Identifier: Apache-2.0
"""The kernel for short sequences computes causal attention, which is written out here."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

from torch import Tensor  # noqa: E402
from torch import dtype as DType  # noqa: E402, N812

from vllm_poc.kernels.attention import LONGEST, attend_short, is_short  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16]
SEQ_LENS = [1, 7, 16, 33, 64, 100, 128]
#: Query heads, kv heads, head_dim.
HEADS = [(16, 8, 128), (8, 8, 64), (8, 1, 128), (16, 4, 32), (12, 4, 16), (5, 1, 64)]
#: How much of the allowance float32 itself may take.
SLACK = 1.1


class Parts(NamedTuple):
    """Of ``[tokens, heads, head_dim]`` each."""

    query: Tensor
    key: Tensor
    value: Tensor


def views(tokens: int, heads: tuple[int, int, int], dtype: DType) -> Parts:
    """Queries, keys and values as a model has them: in one buffer."""
    q_heads, kv_heads, head_dim = heads
    generator = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=generator, device="cuda").to(dtype)
    return Parts(*qkv.view(tokens, -1, head_dim).split((q_heads, kv_heads, kv_heads), dim=1))


def attended(parts: Parts, seq_len: int) -> Tensor:
    out = torch.full_like(parts.query, torch.nan, memory_format=torch.contiguous_format)
    attend_short(*parts, out, seq_len=seq_len, scale=out.shape[-1] ** -0.5)
    return out


def written_out(parts: Parts, seq_len: int) -> Tensor:
    group = parts.query.shape[1] // parts.key.shape[1]
    heads = (parts.query, *(part.repeat_interleave(group, dim=1) for part in parts[1:]))
    query, key, value = (part.double().unflatten(0, (-1, seq_len)).transpose(1, 2) for part in heads)
    later = torch.ones(seq_len, seq_len, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(0, 1)


def assert_right(parts: Parts, seq_len: int) -> None:
    """Each weight may be half a step off, which signs of values do not undo, and so may the result."""
    found, expected = attended(parts, seq_len).double(), written_out(parts, seq_len)
    half_a_step = torch.finfo(parts.value.dtype).eps / 2
    allowed = half_a_step * (written_out(parts._replace(value=parts.value.abs()), seq_len) + expected.abs())
    excess = (found - expected).abs() - SLACK * allowed - torch.finfo(torch.float16).tiny
    assert (excess <= 0).all(), f"{(~(excess <= 0)).sum()} of {found.numel()} elements are too far away"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_attention(seq_len: int, heads: tuple[int, int, int], dtype: DType) -> None:
    assert_right(views(5 * seq_len, heads, dtype), seq_len)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [16, 33, 64])
def test_the_largest_heads(seq_len: int, dtype: DType) -> None:
    assert_right(views(5 * seq_len, (4, 2, 256), dtype), seq_len)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_on_a_single_key(dtype: DType) -> None:
    parts = views(5 * 64, (16, 8, 128), dtype)
    assert_right(parts._replace(query=parts.query * 8), 64)
    assert attended(parts._replace(query=parts.query * 100, key=parts.key * 100), 64).isfinite().all()


def test_other_strides() -> None:
    parts = views(5 * 33, (16, 8, 128), torch.bfloat16)
    turned = Parts(*(part.permute(2, 1, 0).contiguous().permute(2, 1, 0) for part in parts))
    assert turned.query.stride(-1) != 1
    assert torch.equal(attended(turned, 33), attended(parts, 33))


@pytest.mark.parametrize("seq_len", [33, 64])
def test_a_sequence_has_the_same_bits_in_any_batch(seq_len: int) -> None:
    parts = views(512 * seq_len, (16, 8, 128), torch.bfloat16)
    together = attended(parts, seq_len)
    assert torch.equal(attended(parts, seq_len), together)
    last = Parts(*(part[-seq_len:] for part in parts))
    assert torch.equal(attended(last, seq_len), together[-seq_len:])


def test_more_programs_than_a_grid_has_rows() -> None:
    parts = views(70_000, (1, 1, 16), torch.bfloat16)
    assert torch.equal(attended(parts, 1), parts.value)


def test_neighbours_stay_apart() -> None:
    """A NaN behind a sequence's end must not come in with a weight of zero."""
    parts = Parts(*(part.clone() for part in views(3 * 33, (16, 8, 128), torch.bfloat16)))
    expected = attended(parts, 33)
    for part in parts:
        part[:33] = part[66:] = torch.nan
    assert torch.equal(attended(parts, 33)[33:66], expected[33:66])


@pytest.mark.parametrize(
    ("seq_len", "head_dim", "expected"),
    [(1, 16, True), (LONGEST, 256, True), (LONGEST + 1, 128, False), (64, 80, False), (64, 512, False), (64, 8, False)],
)
def test_what_is_short(seq_len: int, head_dim: int, expected: bool) -> None:
    assert is_short(seq_len, head_dim) is expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"sliding_window": (31, 0)}, False),
        ({"logits_soft_cap": 50.0}, False),
        ({"alibi_slopes": [0.5]}, False),
        ({"sinks": [1.0]}, False),
        ({"head_size": 80}, False),
    ],
)
def test_which_layers_attend_so(changed: dict[str, object], expected: bool) -> None:
    from vllm_poc.worker.passes.attention import attends_short  # noqa: PLC0415 - needs vLLM

    plain = {"sliding_window": (-1, -1), "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None, "head_size": 128}
    assert attends_short(SimpleNamespace(**(plain | changed)), 64) is expected
    assert not attends_short(SimpleNamespace(**(plain | changed)), LONGEST + 1)
