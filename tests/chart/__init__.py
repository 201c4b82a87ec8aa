# SPDX-License-Identifier: Apache-2.0
"""Tests of the Helm chart, judged by helm itself, and by a real API server where they are marked ``cluster``."""
