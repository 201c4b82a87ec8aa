# SPDX-License-Identifier: Apache-2.0
"""Completion as kubectl asks for it: by a program on the PATH, whose last line is a directive."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from poc_operator.cli.program import ASKED, completions
from tests.docs.pages import ROOT
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

#: Asks for completions of words; returns the names with their descriptions, and the directive.
Ask = Callable[..., tuple[Mapping[str, str], str]]

NO_FILES, FILES = ":4", ":0"


def test_kubectl_gets_completions(run: Run, api: ApiPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_KUBECTL_POC_COMPLETE", "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_FISH_ACTION"):
        monkeypatch.setenv(name, "")  # so that these are gone after the test: they would answer the commands of others
    assert run("status").code == 0  # the environment leads to the test's cluster
    api.answers[f"{seen.API}/pocvalidations"] = [seen.a_validation()]
    api.answers[f"{seen.API}/poccalibrations"] = [seen.a_calibration()]
    for words, wanted in (
        (["sta"], "status"),
        (["round", ""], "export"),
        (["round", "watch", "ro"], "round-1"),
        (["explain", ""], "round-1"),
        (["explain", ""], "calibration/calibration-1"),
        (["explain", "fleet/"], "fleet/demo"),
        (["explain", "val"], "validation/validation-1"),
        (["explain", "calibration/c"], "calibration/calibration-1"),
    ):
        assert wanted in [line.split("\t")[0] for line in completions(words)], words


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with the plugin alone, as Krew leaves it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    packages = [str(ROOT / name) for name in ("operator", "image")]
    program = f"import sys\nsys.path[:0] = {packages}\nfrom poc_operator.cli.program import main\nmain()\n"
    (folder / "kubectl-poc").write_text(f"#!{sys.executable}\n{program}")
    (folder / "kubectl-poc").chmod(0o755)
    return folder


@pytest.fixture
def ask(plugin: Path, api: ApiPaths, tmp_path: Path) -> Ask:
    """Write the script by the plugin's command, and run it as kubectl does."""
    told = {**os.environ, "PATH": f"{plugin}:{os.environ['PATH']}", "KUBECONFIG": str(tmp_path / "config")}
    api.kubeconfig(tmp_path / "config")
    written = subprocess.run(
        ["kubectl-poc", "completion", plugin], env=told, capture_output=True, text=True, check=True
    )
    assert (written.stdout, written.stderr) == (f"{plugin / ASKED} written\n", "")

    def ask_once(*words: str, **more: str) -> tuple[Mapping[str, str], str]:
        done = subprocess.run([ASKED, *words], env=told | more, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        *lines, directive = done.stdout.splitlines()
        assert re.fullmatch(r":\d+", directive)
        return {name: told for name, _, told in (line.partition("\t") for line in lines)}, directive

    return ask_once


def test_the_script_answers_as_kubectl_reads(ask: Ask) -> None:
    commands, directive = ask("")
    assert directive == NO_FILES
    assert {"status", "explain", "round", "completion"} <= set(commands)
    assert commands["status"].startswith("Show fleets")
    assert ask("round", "watch", "ro") == ({"round-1": ""}, NO_FILES)
    assert ask("-n", "poc", "round", "watch", "--context", "test", "") == ({"round-1": ""}, NO_FILES)
    assert set(ask("status", "-o", "")[0]) == {"table", "json", "yaml"}
    assert "--output" in ask("status", "--")[0]  # options are words like others, and --help is one of them
    assert ask("--help", "sta")[0] == {"status": commands["status"]}


@pytest.mark.parametrize("option", ["-f", "--filename", "--kubeconfig"])
def test_where_a_file_is_wanted_the_shell_offers_files(ask: Ask, option: str) -> None:
    assert ask("round", "create", option, "") == ({}, FILES)


def test_the_line_of_the_user_shows_no_error(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for kubeconfig in ("text", "missing"):
        assert ask("round", "watch", "", KUBECONFIG=str(tmp_path / kubeconfig)) == ({}, NO_FILES)
    assert ask("it's", 'it"s')[1] == NO_FILES


def test_a_wheel_installs_the_program() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[ASKED] == "poc_operator.cli.program:complete"


def test_the_script_is_written_to_standard_output_too(run: Run) -> None:
    done = run("completion")
    assert done.out.startswith("#!/bin/sh\n")
    assert done.out.endswith('exec kubectl-poc __complete "$@"\n')


def test_the_program_of_a_wheel_is_not_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wheel").write_text("of the wheel")
    (tmp_path / ASKED).symlink_to(tmp_path / "wheel")
    done = run("completion", str(tmp_path))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f'"{tmp_path / ASKED}" exists: delete it, or keep it if kubectl completes' in done.err
    assert (tmp_path / "wheel").read_text() == "of the wheel"


def test_a_folder_where_kubectl_does_not_look_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = run("completion", str(tmp_path))
    assert (done.code, done.out) == (0, f"{tmp_path / ASKED} written\n")
    assert done.err == f"note: kubectl does not find it: put {tmp_path} into the PATH, before other folders\n"
    done = run("completion", str(tmp_path / "missing"))
    assert (done.code, "name a folder on the PATH" in done.err) == (1, True)
