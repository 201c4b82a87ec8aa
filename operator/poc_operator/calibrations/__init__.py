# SPDX-License-Identifier: Apache-2.0
"""What to do next for a calibration: its nonces are split into samples, pods measure them, a target follows.

``plan`` has the chain of policies, ``target`` the statistics. No I/O and no clock. ``planning`` has the states, which
all kinds share.
"""
