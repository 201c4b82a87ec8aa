# SPDX-License-Identifier: Apache-2.0
"""Tiny models of real architectures with random weights, for tests of a real vLLM on CPU."""
