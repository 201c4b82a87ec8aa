# SPDX-License-Identifier: Apache-2.0
"""Which processes of vLLM PoC can run with, where results may go, and the token that a file has."""

import logging
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.types import Scope

from tests.support.fakes.clock import FakeClock
from vllm_poc.server.admission import LOOK_SECONDS, Access, Answered, TokenFile, deployment_refusal
from vllm_poc.server.errors import RefusalError
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


class Volume:
    """A Secret as the kubelet mounts it: the file is a link, and the folder that it leads through is swapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._swaps = 0
        self.path = folder / "token"
        self.path.symlink_to(Path("..data") / "token")

    def swap(self, token: str | None) -> None:
        """Put another Secret there; one without the key for None."""
        self._swaps += 1
        there = self._folder / f"..{self._swaps}"
        there.mkdir()
        if token is not None:
            (there / "token").write_text(token)
        (self._folder / "..new").symlink_to(there.name)
        (self._folder / "..new").rename(self._folder / "..data")


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def sent(token: str) -> Scope:
    return {"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]}


def answers(file: TokenFile, token: str, vllm_key: str | None = None) -> bool:
    """Whether somebody with the token is answered."""
    settings = Settings.from_environment({"VLLM_POC_TOKEN_FILE": "named", "VLLM_POC_OPEN": "1"})
    access = Access.decide(settings, Namespace(api_key=[vllm_key] if vllm_key else None), {}, file)
    assert access.answered is Answered.WITH_TOKEN
    with suppress(RefusalError):
        access.check(sent(token))
        return True
    return False


def test_a_secret_that_is_swapped_counts_within_a_second(volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    file = TokenFile(str(volume.path), clock)
    volume.swap("first\n")
    assert [answers(file, token) for token in ("first", "second", "", "first\n")] == [True, False, False, False]
    volume.swap("second")
    clock.advance(LOOK_SECONDS / 2)
    assert answers(file, "first"), "it is not read for each request"
    clock.advance(LOOK_SECONDS / 2)
    assert [answers(file, token) for token in ("first", "second")] == [False, True]
    assert len(caplog.messages) == 1
    volume.swap("third,second")
    clock.advance(LOOK_SECONDS)
    assert [answers(file, token) for token in ("second", "third", "third,second", "first")] == [
        True,
        True,
        False,
        False,
    ]
    assert "has changed" in caplog.text
    assert not any(token in caplog.text for token in ("first", "second"))


@pytest.mark.parametrize("lost", [None, "", " \n"], ids=["gone", "empty", "blank"])
def test_the_last_token_counts_while_the_file_has_none(
    volume: Volume, lost: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    file = TokenFile(str(volume.path), clock)
    volume.swap("first")
    assert answers(file, "first")
    volume.swap(lost)
    for _ in range(3):
        clock.advance(LOOK_SECONDS)
        assert [answers(file, token) for token in ("first", "other", "")] == [True, False, False]
    (line,) = caplog.messages
    assert line.startswith(f"VLLM_POC_TOKEN_FILE: {volume.path} ")
    assert line.endswith("Until then the token that it had last counts on.")
    volume.swap("first")
    clock.advance(LOOK_SECONDS)
    assert answers(file, "first")
    assert caplog.messages[1:] == [f"the token in {volume.path} can be read again"]


@pytest.mark.parametrize("vllm_key", [None, "sk-chat"])
def test_nobody_is_answered_before_the_file_has_a_token(volume: Volume, vllm_key: str | None) -> None:
    """The server does not start without one. If it is lost right then, neither keys nor VLLM_POC_OPEN let others in."""
    clock = FakeClock()
    file = TokenFile(str(volume.path), clock)
    assert not any(answers(file, token, vllm_key) for token in ("", "None", "sk-chat"))
    volume.swap("first")
    clock.advance(LOOK_SECONDS)
    assert answers(file, "first", vllm_key)


def test_a_token_of_a_file_is_not_printed(volume: Volume) -> None:
    volume.swap("s3cret")
    file = TokenFile(str(volume.path), FakeClock())
    assert answers(file, "s3cret")
    settings = Settings.from_environment({"VLLM_POC_TOKEN_FILE": "named"})
    assert "s3cret" not in repr(Access.decide(settings, None, {}, file)) + repr(file)
