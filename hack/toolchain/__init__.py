# SPDX-License-Identifier: Apache-2.0
"""Builds and installs what a local cluster needs on a bare Debian 12 machine (standard library only)."""
