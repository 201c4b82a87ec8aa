# SPDX-License-Identifier: Apache-2.0
"""A model of real size, and what skips these tests elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.device import LAYOUTS, ON_GPU, WHY_NOT_PARALLEL
from tests.vllm.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.client import Client

TEST_SECONDS = 600
#: Segments of so many seconds leave a pass in one.
WHOLE = 10.0
FLAGS = ["--worker-extension-cls", "tests.gpu.unfused.UnfusedExtension"]
FLAGS += ["--middleware", "vllm_poc.server.app.PocMiddleware", "--max-num-seqs", "256"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
            item.add_marker(pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def real_size(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-0.6B with random weights in bfloat16."""
    from tests.gpu.real_size import write_real_size  # noqa: PLC0415 - needs torch

    return write_real_size(tmp_path_factory.mktemp("model"), tokenizer=model_folder / "qwen3-tiny")


@pytest.fixture(scope="session", params=["one", "tp", "pp", "fp8"])
def real_client(
    request: pytest.FixtureRequest, real_size: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """The model of real size as users start it: compiled, with CUDA graphs, on one GPU or on two.

    Of the last one the KV cache has 8 bits.
    """
    if request.param in LAYOUTS and WHY_NOT_PARALLEL is not None:
        pytest.skip(WHY_NOT_PARALLEL)
    log = tmp_path_factory.mktemp("real-size") / "server.log"
    flags = ["--kv-cache-dtype", "fp8"] if request.param == "fp8" else LAYOUTS.get(request.param, [])
    with serving(real_size, log, [*flags, *FLAGS]) as client:
        yield client


@pytest.fixture(scope="session")
def small_client(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A tiny model, whose batches take no time."""
    log = tmp_path_factory.mktemp("small") / "server.log"
    with serving(model_folder / "qwen3-tiny", log, FLAGS) as client:
        yield client
