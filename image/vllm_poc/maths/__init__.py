# SPDX-License-Identifier: Apache-2.0
"""The protocol's formulas, batched over nonces. Needs torch, not vLLM."""
