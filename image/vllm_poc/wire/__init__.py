# SPDX-License-Identifier: Apache-2.0
"""The one contract between operator, pods and receivers: messages, nonce partition, encoding, fraud test.

Imports neither torch nor vLLM, so the operator installs it without a GPU stack and the two sides
cannot drift apart.
"""
