# SPDX-License-Identifier: Apache-2.0
"""Results on their way to callback receivers.

    payloads   results in the words of the two protocols
    delivery   a round's results, in order, until each is accepted or refused for good
    outbox     callbacks outside of rounds, side by side: results of queued requests, and verdicts

What is computed, and when, is decided elsewhere; a round that waits for its receiver is held back by
`delivery.Delivery.add`. The gateway has an outbox of its own, which survives restarts.
"""
