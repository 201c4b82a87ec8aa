# SPDX-License-Identifier: Apache-2.0
"""On the PYTHONPATH of a server: a stand-in for Triton's CPU backend, which is in no package registry.

vLLM's models of DeepSeek-V4 need Triton for their metadata, and vLLM turns it off on a CPU whose Triton has no backend
of that name. With TRITON_INTERPRET=1 each kernel runs as Python on the CPU's tensors.
"""

import os
from importlib.util import find_spec
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") and find_spec("triton") is not None:
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=backends["nvidia"].driver)
