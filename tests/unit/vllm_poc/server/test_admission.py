# SPDX-License-Identifier: Apache-2.0
"""Which processes of vLLM PoC can run with."""

from argparse import Namespace

import pytest

from vllm_poc.server.admission import deployment_refusal

SINGLE = {
    "api_server_count": None,
    "data_parallel_size": 1,
    "data_parallel_size_local": None,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False,
    "data_parallel_multi_port_external_lb": False,
}


@pytest.mark.parametrize("change", [{}, {"api_server_count": 1}, {"data_parallel_size_local": 1}], ids=str)
def test_one_api_server_with_one_engine_passes(change: dict[str, object]) -> None:
    assert (
        deployment_refusal(Namespace(**SINGLE | change, tensor_parallel_size=4, pipeline_parallel_size=2), {}) is None
    )
    assert deployment_refusal(Namespace(**SINGLE | change), {"VLLM_DP_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("api_server_count", 2),
        ("data_parallel_size", 2),
        ("data_parallel_size_local", 0),
        ("data_parallel_rank", 0),
        ("data_parallel_start_rank", 1),
        ("data_parallel_hybrid_lb", True),
        ("data_parallel_external_lb", True),
        ("data_parallel_multi_port_external_lb", True),
    ],
)
def test_several_are_refused_by_the_options_name(option: str, value: object) -> None:
    sentence = deployment_refusal(Namespace(**SINGLE | {option: value}), {})
    assert sentence is not None
    assert f"leave --{option.replace('_', '-')} out" in sentence
    assert "several pods" in sentence


def test_data_parallelism_by_environment_is_refused() -> None:
    sentence = deployment_refusal(Namespace(**SINGLE), {"VLLM_DP_SIZE": "2"})
    assert sentence is not None
    assert "leave VLLM_DP_SIZE out" in sentence
