# SPDX-License-Identifier: Apache-2.0
"""Tests of both Helm charts, judged by helm itself and by a real API server."""
