# SPDX-License-Identifier: Apache-2.0
"""Which processes of vLLM PoC can run with, and where results may go."""

from argparse import Namespace

import pytest

from vllm_poc.server.admission import Access, deployment_refusal
from vllm_poc.settings import Settings

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


@pytest.mark.parametrize("token", [{}, {"VLLM_POC_TOKEN": "s3cret"}], ids=["open", "token"])
@pytest.mark.parametrize(
    ("allow", "hosts"),
    [
        (
            "a.b, *.C",
            {"a.b": True, "A.B": True, "x.c": True, "X.C": True, "c": False, "b.a": False, "127.0.0.1": False},
        ),
        ("*", {"a.b": True, "10.0.0.1": True, "::1": True}),
        ("10.1.*", {"10.1.2.3": True, "10.2.1.1": False}),
    ],
)
def test_a_list_of_hosts_holds_for_everybody(allow: str, hosts: dict[str, bool], token: dict[str, str]) -> None:
    settings = Settings.from_environment({"VLLM_POC_CALLBACK_ALLOW": allow, "VLLM_POC_OPEN": "1", **token})
    access = Access.decide(settings, None, {})
    assert {host: access.allows_callback_to(host) for host in hosts} == hosts


def test_keys_are_not_printed() -> None:
    settings = Settings.from_environment({"VLLM_POC_TOKEN": "s3cret"})
    assert "s3cret" not in repr(Access.decide(settings, None, {}))
    assert "s3cret" not in repr(Access.decide(Settings(), Namespace(api_key=["s3cret"]), {}))
