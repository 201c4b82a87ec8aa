# SPDX-License-Identifier: Apache-2.0
"""The shapes are those of the models that they are named after."""

import pytest

from benchmarks.gpu_shapes import SHAPES, flops_per_nonce, shape_of

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


#: What one of so many ranks has, by vLLM's code.
PARTS = {
    ("minimax-m2.7", 2): {"num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 768},
    ("deepseek-v4-flash", 2): {"num_attention_heads": 32, "o_groups": 4, "moe_intermediate_size": 1024},
    ("glm-5.3-flash", 4): {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "linear_num_heads": 16,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
    },
    ("qwen3-235b-a22b-fp8", 8): {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "intermediate_size": 1536,
        "moe_intermediate_size": 192,
    },
}


@pytest.mark.parametrize(("name", "ranks"), PARTS)
def test_a_rank_has_its_part_of_what_is_divided_and_all_else(name: str, ranks: int) -> None:
    whole, part = (shape.get("text_config", shape) for shape in (SHAPES[name], shape_of(name, ranks=ranks)))
    assert {key: part[key] for key in whole if part[key] != whole[key]} == PARTS[name, ranks]
    assert shape_of(name) == SHAPES[name]


def test_ranks_that_cannot_share_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="16 ranks cannot share 8 o_groups"):
        shape_of("deepseek-v4-flash", ranks=16)


def test_a_few_layers_of_a_part() -> None:
    found = shape_of("deepseek-v4-flash", layers=5, ranks=2)
    assert (found["num_hidden_layers"], found["compress_ratios"]) == (5, [0, 0, 4, 128, 4])
