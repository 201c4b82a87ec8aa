# SPDX-License-Identifier: Apache-2.0
"""Writes what follows from the typed API and the charts' values: CRDs, the chart's copies, reference pages.

``python -m hack.generate`` writes the files, ``--verify`` names those that differ from what it would write.
"""
