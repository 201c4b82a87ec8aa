# SPDX-License-Identifier: Apache-2.0
"""What runs inside vLLM's worker processes."""
