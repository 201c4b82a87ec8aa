# SPDX-License-Identifier: Apache-2.0
"""Random and deliberate faults on a simulated fleet; afterwards the books must balance to the last nonce."""
