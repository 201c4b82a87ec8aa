# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.models.store import models


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The tiny models; on a machine that cannot make them, in the folder that POC_MODELS names."""
    ready_made = os.environ.get("POC_MODELS")
    return Path(ready_made) if ready_made else models()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Collect garbage before a failure is told, and not meanwhile.

    pytest parses the source of the traceback. A finalizer that fails just then has a traceback told, too, for which
    Python parses inside of that parser. Up to 3.11.7 that is a ``SystemError`` (CPython 106905), which ends the run.
    """
    if call.excinfo is None:
        return (yield)
    gc.collect()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
