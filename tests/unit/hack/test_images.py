# SPDX-License-Identifier: Apache-2.0
"""What goes into the images."""

import os
import subprocess
import sys
from pathlib import Path

from hack.images.site import compile_bytecode


def test_modules_are_compiled_once_and_for_all(tmp_path: Path) -> None:
    """A start of the gateway took twice the time without: its file system may only be read."""
    package = tmp_path / "package"
    package.mkdir()
    module = package / "__init__.py"
    module.write_text("VALUE = 'compiled'\n")
    compile_bytecode(tmp_path)
    # As a copy into an image may do.
    module.write_text("VALUE = 'read anew'\n")
    os.utime(module, (1, 1))
    argv = [sys.executable, "-c", "import package; print(package.VALUE)"]
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout == "compiled\n"
