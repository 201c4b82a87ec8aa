# SPDX-License-Identifier: Apache-2.0
"""The worker environments: supported releases of vLLM on CPU with the test tools, pinned by lock files with hashes."""
