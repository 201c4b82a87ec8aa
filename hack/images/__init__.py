# SPDX-License-Identifier: Apache-2.0
"""The project's two images, built from ``image/`` without a daemon and without a network."""
