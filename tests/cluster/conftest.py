# SPDX-License-Identifier: Apache-2.0
"""One cluster for all tests; rounds that clean up after themselves."""

from collections.abc import Iterator

import pytest

from hack.cluster.layout import HOST_ADDRESS
from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE
from hack.generate.__main__ import KINDS
from hack.generate.crds import crd
from tests.cluster.objects import Rounds
from tests.support.fakes.receiver import Receiver, receiving
from tests.support.servers.api_server import ApiServer, api_server
from tests.support.servers.cluster import deployed


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
