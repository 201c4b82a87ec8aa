# SPDX-License-Identifier: Apache-2.0
import pytest
from pydantic import ValidationError

from vllm_poc.server.settings import Settings


def test_defaults_allow_every_host_and_no_token() -> None:
    settings = Settings.from_environment({})
    assert settings.token is None
    assert settings.allows_callback_to("example.org")


def test_variables_are_read_by_their_name() -> None:
    settings = Settings.from_environment(
        {"VLLM_POC_FLUSH_SECONDS": "3", "VLLM_POC_CALLBACK_ALLOW": "a.b, *.C", "OTHER": "x"}
    )
    assert settings.flush_seconds == 3
    assert [settings.allows_callback_to(host) for host in ("a.b", "x.c", "X.C", "c", "b.a")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_the_token_is_not_printed() -> None:
    assert "s3cret" not in repr(Settings.from_environment({"VLLM_POC_TOKEN": "s3cret"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLUSH_SECONDS", "0"),
        ("SLICE_SECONDS", "inf"),
        ("PENDING_RESULTS", "many"),
        ("CALLBACK_ALLOW", " , "),
        ("TOKEN", ""),
    ],
)
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ValidationError, match=f"VLLM_POC_{name}"):
        Settings.from_environment({f"VLLM_POC_{name}": value})
