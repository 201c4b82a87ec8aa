# SPDX-License-Identifier: Apache-2.0
"""One cluster for all tests; rounds that clean up after themselves."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.layout import HOST_ADDRESS
from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE
from hack.generate.__main__ import KINDS
from hack.generate.crds import crd
from tests.cluster.objects import Rounds
from tests.support.fakes.receiver import Receiver, receiving
from tests.support.patience import PATIENCE
from tests.support.scopes import scheduling
from tests.support.servers.api_server import ApiServer, api_server
from tests.support.servers.cluster import deployed

Plugin = Callable[..., str]
_PLUGIN_SECONDS = 60

#: The work of one process, and that of another. Modules with an API server share it, in the order of their names.
THE_CLUSTER, THE_API_SERVER = "the cluster", "the API server"
#: Modules whose tests have an API server of their own.
ALONE = (
    *("test_bad_specs", "test_fleet_controllers", "test_fleet_groups", "test_fleet_rights", "test_fleet_specs"),
    *("test_fleets", "test_ml_nodes", "test_process", "test_rolling_updates", "test_schema"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _cluster_of(item.nodeid) != THE_CLUSTER and "kube" in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid} uses the cluster: take its module out of ALONE")
        if PATIENCE > 1 and (limit := item.get_closest_marker("timeout")) and item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(PATIENCE * limit.args[0], **limit.kwargs), append=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # noqa: ANN401 - xdist ships no types
    """Give all tests of the one cluster to one process. They mostly wait, so another takes what needs no cluster."""
    return scheduling(config, log, _cluster_of)


def _cluster_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    folder, _, name = file.removesuffix(".py").rpartition("/")
    return THE_API_SERVER if folder == "tests/cluster" and name in ALONE else THE_CLUSTER


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line("The local cluster stays up for the next run; `make demo-down` removes it.")


@pytest.fixture(scope="session")
def api() -> Iterator[ApiServer]:
    """An API server with our CRDs and nothing else."""
    with api_server() as server:
        for kind in KINDS:
            server.install(crd(kind))
        yield server


@pytest.fixture(scope="session")
def kube() -> Kube:
    return deployed()


@pytest.fixture
def rounds(kube: Kube) -> Iterator[Rounds]:
    """Rounds on the vLLM pods; what a test leaves behind is deleted."""
    with Rounds(kube, NAMESPACE) as own:
        yield own


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A callback receiver that pods can reach."""
    with receiving(HOST_ADDRESS) as own:
        yield own


@pytest.fixture
def plugin(kube: Kube, tmp_path: Path) -> Plugin:
    """Run ``kubectl poc``, found by kubectl on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, call in (("kubectl-poc", "main"), ("kubectl_complete-poc", "complete")):
        script = folder / name
        script.write_text(f"#!{sys.executable}\nfrom poc_operator.cli.program import {call}\n{call}()\n")
        script.chmod(0o755)
    packages = os.pathsep.join(path for path in sys.path if path)
    environment = {**kube.environment, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": packages}

    def run(*words: str | Path, fails: bool | None = False) -> str:
        argv = [kube.kubectl_path, "poc", *words]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=PATIENCE * _PLUGIN_SECONDS, check=False, env=environment
        )
        assert fails is None or (done.returncode != 0) == fails, f"{done.stdout}\n{done.stderr}"
        return done.stderr if fails else done.stdout

    return run
