# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share."""

import os
from pathlib import Path

import pytest

from hack.models.store import models


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The tiny models; on a machine that cannot make them, in the folder that POC_MODELS names."""
    ready_made = os.environ.get("POC_MODELS")
    return Path(ready_made) if ready_made else models()
