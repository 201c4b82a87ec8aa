# SPDX-License-Identifier: Apache-2.0
"""These tests run parts of the worker without a server; vLLM alone takes half a minute to import."""

import pytest

IMPORT_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/unit/vllm_poc/worker/" in item.path.as_posix():
            item.add_marker(pytest.mark.torch)
            item.add_marker(pytest.mark.timeout(IMPORT_SECONDS))
