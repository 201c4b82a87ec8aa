# SPDX-License-Identifier: Apache-2.0
"""Tests of README.md and docs/: every block of shell and YAML that can run does run.

``pages`` finds the blocks and the marks that say how a block is tested. A block without a mark runs on any machine; one
that needs a cluster runs with ``-m cluster``; one that cannot run says why. ``test_blocks.py`` counts the marks.
"""
