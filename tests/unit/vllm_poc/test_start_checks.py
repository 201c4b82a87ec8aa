# SPDX-License-Identifier: Apache-2.0
"""vLLM's own command, too, ends with a sentence before it serves what PoC cannot run on."""

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from vllm_poc.server import app
from vllm_poc.settings import SettingsError
from vllm_poc.start_checks import StartError


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("vllm.version")
    module.__dict__["__version__"] = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm.version", module)
    return module


@pytest.mark.usefixtures("release")
def test_a_misspelt_setting_ends_the_import_of_the_middleware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_POC_TOKN", "secret")
    with pytest.raises(SettingsError, match=r"VLLM_POC_TOKN is not a setting: did you mean VLLM_POC_TOKEN"):
        importlib.reload(app)


@pytest.mark.usefixtures("release")
def test_a_file_without_a_token_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("VLLM_POC_TOKEN_FILE", str(file))
    with pytest.raises(SettingsError, match=r"VLLM_POC_TOKEN_FILE: .* cannot be read .*: mount the Secret there"):
        importlib.reload(app)
    file.write_text("s3cret")
    importlib.import_module("vllm_poc.start_checks").check_start()


def test_an_old_release_ends_it(release: ModuleType) -> None:
    release.__dict__["__version__"] = "0.22.1"
    with pytest.raises(StartError, match=r"made for vLLM 0\.23 to .*, not for 0\.22\.1: take one of them"):
        importlib.reload(app)


@pytest.mark.usefixtures("release")
def test_the_range_does_not() -> None:
    middleware = app.PocMiddleware
    importlib.import_module("vllm_poc.start_checks").check_start()
    assert app.PocMiddleware is middleware


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_server_in_rust_ends_it(monkeypatch: pytest.MonkeyPatch, value: str, refused: bool) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
    with pytest.raises(StartError, match="leave VLLM_USE_RUST_FRONTEND out") if refused else nullcontext():
        importlib.import_module("vllm_poc.start_checks").check_start()


def test_where_there_is_no_vllm_the_settings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", None)
    importlib.import_module("vllm_poc.start_checks").check_start()
    monkeypatch.setenv("VLLM_POC_DRAIN_SECONDS", "-1")
    with pytest.raises(SettingsError, match="VLLM_POC_DRAIN_SECONDS"):
        importlib.reload(app)
