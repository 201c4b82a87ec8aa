# SPDX-License-Identifier: Apache-2.0
"""Real servers, started once for all tests that need them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fakes.receiver import Receiver, receiving
from tests.support.patience import PATIENCE
from tests.support.scopes import scheduling
from tests.vllm.families import FAMILIES, Family, is_servable
from tests.vllm.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client

NEEDS_WORKER = "needs the worker environment: $(python3 -m hack.vllm path)/bin/python -m pytest tests/vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
            # The first test of a server also waits for its start.
            item.add_marker(pytest.mark.timeout(300 * PATIENCE))
            item.add_marker(pytest.mark.skipif(find_spec("vllm") is None, reason=NEEDS_WORKER))


#: Modules whose tests take none of the servers that others share.
ALONE = (
    *("test_cli", "test_decode", "test_decode_routes", "test_deepseek_v4", "test_download", "test_multimodal"),
    *("test_parallel", "test_plain_vllm", "test_recurrent", "test_refusals", "test_self_check"),
)


#: Families whose server takes its time to start, and shows little that those of others do not.
_LONG = {"gemma3": pytest.mark.long}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # noqa: ANN401 - xdist ships no types
    """Give all tests of shared servers to one process, so that no two start the same server."""
    return scheduling(config, log, _servers_of)


def _servers_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    alone = not file.startswith("tests/vllm/") or file.endswith(tuple(f"/{name}.py" for name in ALONE))
    return file if alone else "the shared servers"


@pytest.fixture(scope="session")
def qwen3(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The server of most tests: Qwen3 without compilation, with a checksum over its KV cache."""
    log = tmp_path_factory.mktemp("qwen3") / "server.log"
    with serving(model_folder / "qwen3-tiny", log, FAMILIES["qwen3"]) as client:
        yield client


@pytest.fixture(scope="session", params=[pytest.param(name, marks=_LONG.get(name, ())) for name in FAMILIES])
def family(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    """Each family in turn; pytest runs all tests of one before it starts the next."""
    from tests.vllm.reference import Reference  # noqa: PLC0415 - needs transformers

    name: str = request.param
    if not is_servable(name):
        pytest.skip("this release of vLLM has no latent attention for CPU")
    model = model_folder / f"{name}-tiny"
    if name == "qwen3":
        yield Family(name, request.getfixturevalue("qwen3"), Reference(model))
        return
    log = tmp_path_factory.mktemp(name) / "server.log"
    with serving(model, log, FAMILIES[name]) as client:
        yield Family(name, client, Reference(model))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver
