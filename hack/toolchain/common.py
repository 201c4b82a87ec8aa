# SPDX-License-Identifier: Apache-2.0
"""What every program under hack/ shares: the home folder, commands with a time limit, locks."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .board import BOARD

ERROR_LINES = 20


class UserError(Exception):
    """One sentence for the person at the terminal: what is wrong and what to do about it."""


def home() -> Path:
    """The one folder that everything under hack/ writes to."""
    return Path(os.environ.get("POC_HOME", "/var/lib/vllm-poc-operator")).absolute()


def cache() -> Path:
    """The part of the home folder that outlives a cluster: built tools and images."""
    return home() / "cache"


def require_root(purpose: str) -> None:
    """Stop early and clearly instead of failing half-way on a permission."""
    if os.geteuid() != 0:
        raise UserError(f"{purpose} needs root: run the command as root, for example with sudo.")


def run(
    argv: Sequence[str | Path],
    *,
    limit: float,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command to its end and return its standard output; a UserError has a failed one's last lines."""
    words = [str(word) for word in argv]
    try:
        # Never the terminal's input: a command that asks a question must not wait for an answer.
        done = subprocess.run(
            words, input=stdin or "", env=env, cwd=cwd, timeout=limit, text=True, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError(f"The command {words[0]} is missing: run python3 -m hack.toolchain.") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(words[:3])} did not end within {limit:.0f} s.") from None
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-ERROR_LINES:])
        raise UserError(f"{' '.join(words[:3])} failed with exit status {done.returncode}:\n{tail}")
    return done.stdout


def wait_until(ready: Callable[[], bool], limit: float, pause: float = 0.2) -> bool:
    """Ask until the answer is yes or the time is over; tells which."""
    end = time.monotonic() + limit
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


@contextmanager
def exclusive(name: str, limit: float = 1200) -> Iterator[None]:
    """Let one process at a time do the named work; another waits for it, but not for ever."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / f"{name}.lock").open("w") as handle:

        def taken() -> bool:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not taken():
            BOARD.say(f"waiting for another run that holds {handle.name}")
            if not wait_until(taken, limit):
                raise UserError(f"Another run holds {handle.name} for {limit:.0f} s now: wait or stop it.")
        yield


def main(program: Callable[[], None], *, resumes: bool = False) -> None:
    """Run a command line program; a UserError is printed alone, without a traceback, and so is an interruption.

    ``resumes`` says that another run goes on where one was interrupted.
    """
    try:
        program()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        advice = ": run the same command again, and it keeps what is done already" if resumes else ""
        print(f"interrupted{advice}", file=sys.stderr)
        sys.exit(130)
