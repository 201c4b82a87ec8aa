# SPDX-License-Identifier: Apache-2.0
"""The test vectors of ``tests/known_answers.json``."""

import json
from pathlib import Path
from typing import Any

ANSWERS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "known_answers.json").read_text())

BLOCK_HASH: str = ANSWERS["inputs"]["block_hash"]
PUBLIC_KEY: str = ANSWERS["inputs"]["public_key"]

UNIFORM_ABS: float = ANSWERS["tolerance"]["uniform_abs"]
NORMAL_ABS: float = ANSWERS["tolerance"]["normal_abs"]
UNIT_ABS: float = ANSWERS["tolerance"]["unit_vector_abs"]
F16_ULP: int = ANSWERS["tolerance"]["f16_ulp"]


def label(entry: object) -> str:
    """Name a parametrised case by the short fields of its entry."""
    if not isinstance(entry, dict):
        return str(entry)
    return "-".join(f"{key}={value}" for key, value in entry.items() if isinstance(value, int | str))[:60]
