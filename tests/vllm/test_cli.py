# SPDX-License-Identifier: Apache-2.0
"""The command line around vLLM's own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.server import command_environment
from vllm_poc.cli import EXTENSION_CLASS, MIDDLEWARE, UsageError, check_version, server_arguments


def test_without_enable_poc_it_is_plain_vllm() -> None:
    assert server_arguments(["serve", "m", "--port", "1"]) == ["--model", "m", "--port", "1"]


def test_enable_poc_adds_extension_and_middleware() -> None:
    arguments = server_arguments(["serve", "--model", "m", "--enable-poc"])
    ours = ["--worker-extension-cls", EXTENSION_CLASS, "--middleware", MIDDLEWARE]
    assert arguments == ["--model", "m", *ours]


@pytest.mark.parametrize("flag", [["--worker-extension-cls", "x.Y"], ["--worker_extension_cls=x.Y"]])
def test_a_second_extension_class_is_refused(flag: list[str]) -> None:
    with pytest.raises(UsageError, match="leave yours out"):
        server_arguments(["serve", "m", "--enable-poc", *flag])


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size"),
        (["--data_parallel_size=2"], "--data-parallel-size"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--data-parallel-rank", "0"], "--data-parallel-rank"),
        (["--data-parallel-hybrid-lb"], "--data-parallel-hybrid-lb"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["-asc=2"], "--api-server-count"),
    ],
    ids=str,
)
def test_several_servers_or_engines_are_refused(words: list[str], culprit: str) -> None:
    with pytest.raises(UsageError, match=f"leave {culprit} out, and start several pods"):
        server_arguments(["serve", "m", "--enable-poc", *words])
    assert server_arguments(["serve", "m", *words]) == ["--model", "m", *words], "without PoC it is plain vLLM"


def test_a_config_file_is_looked_into(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data-parallel-size: 2\n")
    with pytest.raises(UsageError, match="leave --data-parallel-size out"):
        server_arguments(["serve", "m", "--enable-poc", "--config", str(config)])


def test_data_parallelism_by_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    with pytest.raises(UsageError, match="leave VLLM_DP_SIZE out"):
        server_arguments(["serve", "m", "--enable-poc"])


def test_a_node_without_an_api_server_is_refused() -> None:
    with pytest.raises(UsageError, match=f"--headless .* with --worker-extension-cls {EXTENSION_CLASS}"):
        server_arguments(["serve", "m", "--enable-poc", "--headless"])


def test_one_api_server_with_a_sharded_model_passes() -> None:
    words = ["-tp", "2", "--pipeline-parallel-size", "2", "-asc", "1"]
    assert server_arguments(["serve", "m", "--enable-poc", *words])[: 2 + len(words)] == ["--model", "m", *words]


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
