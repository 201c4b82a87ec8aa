# SPDX-License-Identifier: Apache-2.0
"""Rounds in the Kubernetes API server."""
