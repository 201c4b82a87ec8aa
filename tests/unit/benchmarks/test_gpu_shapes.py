# SPDX-License-Identifier: Apache-2.0
"""The shapes are those of the models that they are named after."""

import pytest

from benchmarks.gpu_shapes import SHAPES, flops_per_nonce

#: Parameters that a token meets, in billions, without embeddings and the head; cards count these too.
ACTIVE = {
    "qwen3-0.6b": 0.44,
    "qwen3-32b": 31.2,
    "qwen3-235b-a22b-fp8": 21.0,
    "minimax-m2.7": 9.8,
    "deepseek-v4-flash": 12.5,
    "glm-5.3-flash": 16.2,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_takes_two_operations_for_each_parameter_that_it_meets(name: str) -> None:
    assert flops_per_nonce(SHAPES[name], seq_len=1) / 2e9 == pytest.approx(ACTIVE[name], rel=0.03)


def test_longer_sequences_also_attend_to_more() -> None:
    short, long = (flops_per_nonce(SHAPES["minimax-m2.7"], seq_len) / seq_len for seq_len in (1, 1024))
    assert long - short == pytest.approx(62 * 4 * 48 * 128 * (1025 / 2 - 1))
