# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest

from vllm_poc.settings import Settings, SettingsError, read_tokens


def test_by_default_nobody_else_is_answered() -> None:
    settings = Settings.from_environment({})
    assert (settings.token, settings.open, settings.callback_allow) == (None, False, None)


def test_variables_are_read_by_their_name() -> None:
    settings = Settings.from_environment(
        {
            "VLLM_POC_FLUSH_SECONDS": "3",
            "VLLM_POC_CALLBACK_ALLOW": "a.b, *.C",
            "VLLM_POC_OPEN": "1",
            "OTHER": "x",
        }
    )
    assert (settings.flush_seconds, settings.callback_allow, settings.open) == (3, ("a.b", "*.C"), True)


def test_the_token_is_not_printed() -> None:
    assert "s3cret" not in repr(Settings.from_environment({"VLLM_POC_TOKEN": "s3cret"}))


def test_a_token_stands_in_a_variable_or_in_a_file() -> None:
    settings = Settings.from_environment({"VLLM_POC_TOKEN_FILE": "/a/token"})
    assert (settings.token, settings.token_file) == (None, "/a/token")
    with pytest.raises(SettingsError, match=r"^VLLM_POC_TOKEN_FILE: there is a token by VLLM_POC_TOKEN, too: leave"):
        Settings.from_environment({"VLLM_POC_TOKEN_FILE": "/a/token", "VLLM_POC_TOKEN": "s3cret"})


def test_a_token_is_read_without_the_line_break_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" s3cret\n")
    assert read_tokens(str(file)) == ("s3cret",)
    file.write_text("new, old\n")
    assert read_tokens(str(file)) == ("new", "old")


@pytest.mark.parametrize("content", ["s3 cret", "new\nold", "new,ol\x00d", "schlüssel"])
def test_a_token_that_no_header_can_have_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(SettingsError, match="has a token that no header can have: leave out blanks") as raised:
        read_tokens(str(file))
    assert content not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b", ,", "is empty"),
        (b"s3cret\xff", r"cannot be read \(it is no text\)"),
    ],
    ids=str,
)
def test_a_file_without_a_token_is_named_with_the_remedy(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    expected = f"^VLLM_POC_TOKEN_FILE: {re.escape(str(file))} {says}: mount the Secret there, or set VLLM_POC_TOKEN"
    with pytest.raises(SettingsError, match=expected) as raised:
        read_tokens(str(file))
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLUSH_SECONDS", "0"),
        ("SLICE_SECONDS", "inf"),
        ("PENDING_RESULTS", "many"),
        ("CALLBACK_ALLOW", " , "),
        ("TOKEN", ""),
        ("TOKEN_FILE", ""),
        ("OPEN", ""),
        ("OPEN", "everybody"),
    ],
)
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^VLLM_POC_{name}: "):
        Settings.from_environment({f"VLLM_POC_{name}": value})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("VLLM_POC_TOKENS", "VLLM_POC_TOKEN"),
        ("vllm_poc_token", "VLLM_POC_TOKEN"),
        ("VLLM_POC_CALLBACKS_ALLOW", "VLLM_POC_CALLBACK_ALLOW"),
        ("VLLM_POC_FLUSH", "VLLM_POC_FLUSH_SECONDS"),
        ("VLLM_POC_PORTS", "VLLM_POC_"),
        ("VLLM_POC_", "VLLM_POC_"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} is not a setting: did you mean {nearest}"):
        Settings.from_environment({name: "x", "VLLM_POC_TOKEN": "s3cret"})


@pytest.mark.parametrize("field", Settings.model_fields)
def test_each_setting_misspelt_is_told_from_the_others(field: str) -> None:
    name = f"VLLM_POC_{field.upper()}"
    for misspelt in (name + "S", name[:-1], name.replace("_POC_", "_POC_X")):
        with pytest.raises(SettingsError, match=f"did you mean {name}[?]"):
            Settings.from_environment({misspelt: "1"})


@pytest.mark.parametrize("service", ["VLLM_POC", "VLLM_POC_WORKER", "VLLM_POC_TOKENS_2"])
def test_what_kubernetes_says_of_services_is_no_setting(service: str) -> None:
    """Unless a pod says otherwise, it gets these variables for each Service of its namespace."""
    port = f"{service}_PORT_8000_TCP"
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT"]
    links = [*(f"{service}_{name}" for name in names), port, f"{port}_PROTO", f"{port}_PORT", f"{port}_ADDR"]
    assert Settings.from_environment(dict.fromkeys(links, "tcp://10.0.0.1:8000")).token is None


CODEBOOK, REBUILD, RESERVE = (f"VLLM_POC_DECODE_{name}" for name in ("CODEBOOK", "REBUILD_CODEBOOK", "RESERVE_BYTES"))


@pytest.mark.parametrize(
    ("environment", "setup"),
    [
        ({}, None),
        ({REBUILD: "0"}, None),
        ({CODEBOOK: "/a.pt", RESERVE: "9"}, {"codebook": "/a.pt", "rebuild": False, "reserve_bytes": 9}),
        ({REBUILD: "1", RESERVE: "9"}, {"codebook": None, "rebuild": True, "reserve_bytes": 9}),
    ],
    ids=str,
)
def test_the_decode_scheme_is_set_up_by_its_codebook(environment: dict[str, str], setup: object) -> None:
    assert Settings.from_environment(environment).decode_setup == setup


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({CODEBOOK: "/a.pt"}, f"{RESERVE}: the decode scheme needs memory for keys and values"),
        ({REBUILD: "1"}, f"{RESERVE}: the decode scheme needs memory for keys and values"),
        ({RESERVE: "9"}, f"{RESERVE}: is for the decode scheme: set {CODEBOOK}, too"),
        ({CODEBOOK: "/a.pt", REBUILD: "1", RESERVE: "9"}, f"{REBUILD}: there is a codebook by {CODEBOOK}"),
        ({CODEBOOK: "", RESERVE: "9"}, f"{CODEBOOK}: "),
        ({CODEBOOK: "/a.pt", RESERVE: "-1"}, f"{RESERVE}: "),
    ],
    ids=str,
)
def test_half_a_setup_of_the_decode_scheme_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{message}"):
        Settings.from_environment(environment)
