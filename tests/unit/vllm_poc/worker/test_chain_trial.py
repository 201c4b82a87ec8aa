# SPDX-License-Identifier: Apache-2.0
"""When two ways to compute chains are taken for the same."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

import torch

from vllm_poc.maths import decode
from vllm_poc.rpc import DecodeResult
from vllm_poc.worker.chain_trial import are_close, margin_tolerance

TOLERANCE = margin_tolerance(torch.bfloat16, quantised=False)


def chains(margins: list[float], points: list[int] | None = None) -> DecodeResult:
    points = points or [1] * len(margins)
    return DecodeResult(
        complete=True,
        left=0,
        work="step",
        parts=1,
        cut=1,
        captures=False,
        next="step",
        indices=[points],
        margins=[margins],
        rebuilt=False,
    )


@pytest.mark.parametrize(
    ("dtype", "quantised", "expected"),
    [
        (torch.bfloat16, False, 0.015625),
        (torch.float16, False, 0.001953125),
        (torch.float32, False, 0.001953125),
        (torch.float16, True, 0.015625),
    ],
    ids=str,
)
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype, quantised: bool, expected: float) -> None:
    assert margin_tolerance(dtype, quantised=quantised) == expected


@pytest.mark.parametrize(
    ("found", "close"),
    [
        (chains([0.1, 0.2]), True),
        (chains([0.1 + TOLERANCE, 0.2 - 0.9 * TOLERANCE]), True),
        (chains([0.1 + 3 * TOLERANCE, 0.2]), False),
        (chains([float("nan"), 0.2]), False),
        (chains([0.1, 0.2], [1, decode.NO_POINT]), False),
        (chains([0.1, 0.2], [1, 7]), True),
        (None, True),
    ],
    ids=["equal", "rounded", "further", "not a number", "not finite", "near a border", "another rank"],
)
def test_rounding_is_close_and_more_is_not(found: DecodeResult | None, close: bool) -> None:
    assert are_close(found, chains([0.1, 0.2]), TOLERANCE) is close


def test_chains_that_have_nothing_in_common_are_four_times_as_far_apart_as_is_allowed() -> None:
    generator = torch.Generator().manual_seed(0)
    codebook, picks = decode.rebuild_codebook(), torch.arange(256).expand(2000, -1)
    claims = torch.randint(16, (2000,), generator=generator)
    one, other = (
        decode.claimed_margins(decode.snap(torch.randn(2000, 512, generator=generator), picks, codebook).scores, claims)
        for _ in range(2)
    )
    assert (one - other).abs().mean() > 4 * TOLERANCE
