# SPDX-License-Identifier: Apache-2.0
"""The project's three images, built from ``image/`` without a daemon and without a network."""
