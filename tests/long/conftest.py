# SPDX-License-Identifier: Apache-2.0
"""What the long proofs share; their figures are printed after the tests."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

NEEDS_WORKER = "needs the worker environment: make test-long"
FIGURES = pytest.StashKey[list[str]]()

Report = Callable[[str], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/long/" in item.path.as_posix():
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(1800))  # where a test names no other
            item.add_marker(pytest.mark.skipif(find_spec("vllm") is None, reason=NEEDS_WORKER))


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keep a line for the end of the output, so that a figure can be quoted also when its test passes."""
    figures = request.config.stash.setdefault(FIGURES, [])
    return lambda line: figures.append(f"{request.node.name}: {line}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.line(line)
