# SPDX-License-Identifier: Apache-2.0
"""The served model's forward pass with fewer, faster operations: what is replaced while PoC runs, and by what."""
