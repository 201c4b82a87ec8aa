# SPDX-License-Identifier: Apache-2.0
"""Proofs that need a GPU."""
