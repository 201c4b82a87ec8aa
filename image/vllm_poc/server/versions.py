# SPDX-License-Identifier: Apache-2.0
"""Which vLLM runs here."""

import importlib


def vllm_version() -> str:
    """Return vLLM's version. ImportError if it is not installed.

    Not from package metadata: the CPU build is a distribution of another name.
    """
    return str(importlib.import_module("vllm.version").__version__)
