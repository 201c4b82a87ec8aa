# SPDX-License-Identifier: Apache-2.0
"""What must hold before vLLM loads a model: the release, its front end, and the settings.

The command line checks it first. vLLM's own command knows nothing of it, and imports the extension before it loads the
model, and the middleware before it serves. Both check it on import, since what fails later, while Starlette builds the
middleware, leaves a server that answers 500 to everything.
"""

import importlib
import os
from collections.abc import Mapping

from vllm_poc.logs import get_logger
from vllm_poc.settings import Settings, read_tokens

#: First and last minor release of vLLM that the extension is made for.
RELEASES = ((0, 23), (0, 32))
#: The same for people.
FIRST_RELEASE, LAST_RELEASE = (".".join(map(str, release)) for release in RELEASES)

_log = get_logger(__name__)


class StartError(Exception):
    """One sentence for the person who starts the server."""


def check_start() -> None:
    """Check the release that is installed, if any is, and the environment. StartError, or SettingsError."""
    check_token_file(Settings.from_environment(os.environ))
    check_front_end(os.environ)
    try:
        version = vllm_version()
    except ImportError:
        return  # as where the API is documented or tested
    check_version(version)


def check_token_file(settings: Settings) -> None:
    """SettingsError if there is to be a file with the token, and it has none."""
    if settings.token_file is not None:
        read_tokens(settings.token_file)


def check_front_end(environment: Mapping[str, str]) -> None:
    """StartError if vLLM's API server is the one in Rust: it would serve without PoC's routes, and tell nobody."""
    if environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise StartError("vLLM's server in Rust has no PoC routes: leave VLLM_USE_RUST_FRONTEND out.")


def vllm_version() -> str:
    """Return vLLM's version. ImportError if it is not installed.

    Not from package metadata: the CPU build is a distribution of another name.
    """
    return str(importlib.import_module("vllm.version").__version__)


def check_version(version: str) -> None:
    """Warn of a release that is newer than those that PoC is made for. StartError if it is older, or no release.

    What has changed in a newer one is found by looking at the model, or by a parity check of what it computes.
    """
    try:
        minor = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        minor = ()
    if minor < RELEASES[0]:
        known = f"{FIRST_RELEASE} to {LAST_RELEASE}"
        raise StartError(f"PoC is made for vLLM {known}, not for {version}: take one of them.")
    if minor > RELEASES[1]:
        _log.warning(
            "vLLM %s is newer than %s, the last release that PoC is made for: check results first",
            version,
            LAST_RELEASE,
        )
