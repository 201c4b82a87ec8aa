# SPDX-License-Identifier: Apache-2.0
"""The worker environment: vLLM on CPU with the test tools, pinned by a lock file with hashes."""
