# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes operator that runs Proof-of-Compute rounds on vLLM pods."""
