# SPDX-License-Identifier: Apache-2.0
"""The command line around vLLM's own."""

import subprocess
import sys

import pytest

from tests.vllm.server import command_environment
from vllm_poc.cli import EXTENSION_CLASS, MIDDLEWARE, UsageError, check_version, server_arguments


def test_without_enable_poc_it_is_plain_vllm() -> None:
    assert server_arguments(["serve", "m", "--port", "1"]) == ["--model", "m", "--port", "1"]


def test_enable_poc_adds_extension_and_middleware() -> None:
    arguments = server_arguments(["serve", "--model", "m", "--enable-poc"])
    ours = ["--worker-extension-cls", EXTENSION_CLASS, "--middleware", MIDDLEWARE]
    assert arguments == ["--model", "m", *ours]


@pytest.mark.parametrize("flag", [["--worker-extension-cls", "x.Y"], ["--worker-extension-cls=x.Y"]])
def test_a_second_extension_class_is_refused(flag: list[str]) -> None:
    with pytest.raises(UsageError, match="leave yours out"):
        server_arguments(["serve", "m", "--enable-poc", *flag])


def test_a_wrong_setting_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_POC_FLUSH_SECONDS", "soon")
    with pytest.raises(UsageError, match=r"VLLM_POC_FLUSH_SECONDS: .*valid number"):
        server_arguments(["serve", "m", "--enable-poc"])


@pytest.mark.parametrize("version", ["0.23.0", "0.25.1", "0.32.0", "0.32.1.dev3+cpu"])
def test_tested_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.22.9", "0.33.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(UsageError, match="--poc-allow-untested-vllm"):
        check_version(version)


@pytest.mark.parametrize("words", [["start"], ["serve", "m", "--enable-poc", "--worker-extension-cls", "x.Y"]])
def test_a_bad_command_line_exits_with_2(words: list[str]) -> None:
    argv = [sys.executable, "-m", "vllm_poc", *words]
    done = subprocess.run(argv, env=command_environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"error: " in done.stderr
    assert b"Traceback" not in done.stderr
