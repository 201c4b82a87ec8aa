# SPDX-License-Identifier: Apache-2.0
"""Whole releases, built twice: a target of its own, since they download and take minutes."""
