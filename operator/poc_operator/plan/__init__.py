# SPDX-License-Identifier: Apache-2.0
"""What to do next for a round: a pure function of the round, its pods, their reports and the time.

``plan()`` in ``plan.py`` is the chain; each of the other modules is one link of it. No I/O, no
clock, so every decision is tested as a table.
"""
