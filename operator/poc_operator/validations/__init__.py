# SPDX-License-Identifier: Apache-2.0
"""What to do next for a validation: its proofs are split into samples, pods recompute them, a test judges them all.

``plan`` has the chain of policies and the verdict, ``proofs`` what a list of proofs must be. No I/O and no clock.
``planning`` has the states, which all kinds share.
"""
