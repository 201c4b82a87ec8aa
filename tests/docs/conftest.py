# SPDX-License-Identifier: Apache-2.0
"""helm, which renders what the pages tell people to install."""

from pathlib import Path

import pytest

from hack.toolchain.tools import TOOL_SETS, ensure_tools, tool_path


@pytest.fixture(scope="session")
def helm() -> Path:
    """The pinned helm, built first where it is missing."""
    ensure_tools([tools for tools in TOOL_SETS if tools.name == "helm"])
    return tool_path("helm")
