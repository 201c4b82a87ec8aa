# SPDX-License-Identifier: Apache-2.0
"""Tests of the alerts, the dashboards and the runbooks, with helm and promtool. They need no cluster."""
