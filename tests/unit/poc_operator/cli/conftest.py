# SPDX-License-Identifier: Apache-2.0
"""``kubectl poc`` as a person runs it, against an API server of the test's making."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from poc_operator.cli.program import app, guarded
from tests.support.fakes.api_paths import ApiPaths, api_paths
from tests.unit.poc_operator.cli.seen import a_cluster


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def api() -> Iterator[ApiPaths]:
    with api_paths() as paths:
        paths.answers.update(a_cluster())
        yield paths


@pytest.fixture
def run(api: ApiPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))

    def run_once(*words: str) -> Done:
        codes: list[int] = []

        def go() -> None:
            try:
                app(args=list(words), prog_name="kubectl-poc")
            except SystemExit as end:
                codes.append(int(end.code or 0))

        failed = guarded(go)
        told = capsys.readouterr()
        return Done(failed or (codes[0] if codes else 0), told.out, told.err)

    return run_once
