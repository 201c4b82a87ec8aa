# SPDX-License-Identifier: Apache-2.0
"""The walks of docs/develop/walks, and the files that really take part in what they describe.

A walk is a page with a numbered list. Each entry begins with a file in backquotes, in the order in which a reader needs
them, and says what happens there.
"""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "develop" / "walks"
_STEP = re.compile(r"^\d+\. `([^`]+)`", re.MULTILINE)


def steps(text: str) -> list[str]:
    """Return the files of a walk, or of a part of its page, in order."""
    return _STEP.findall(text)


@contextmanager
def files_called(*packages: str) -> Iterator[set[str]]:
    """Collect the files of these folders in which a function is called meanwhile, in any thread.

    The body of a module or of a class, which runs at its import, does not count.
    """
    roots = tuple(str(ROOT / package) for package in packages)
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:  # noqa: ANN401 - what the interpreter passes
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(roots) and not code.co_name.startswith("<module"):
            found.add(str(Path(code.co_filename).relative_to(ROOT)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
