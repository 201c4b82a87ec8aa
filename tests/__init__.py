# SPDX-License-Identifier: Apache-2.0
"""Tests; a package so that test modules can import ``tests.support``."""
