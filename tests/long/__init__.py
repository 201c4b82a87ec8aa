# SPDX-License-Identifier: Apache-2.0
"""Long proofs on real vLLM servers."""
