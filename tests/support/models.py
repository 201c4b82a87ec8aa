# SPDX-License-Identifier: Apache-2.0
"""Where the tiny models are."""

import os
from pathlib import Path

from hack.models.store import models


def tiny_models() -> Path:
    """Return the folder of the tiny models; on a machine that cannot make them, the one that POC_MODELS names."""
    ready_made = os.environ.get("POC_MODELS")
    return Path(ready_made) if ready_made else models()
