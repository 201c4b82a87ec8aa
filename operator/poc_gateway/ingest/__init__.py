# SPDX-License-Identifier: Apache-2.0
"""What pods deliver: received, checked against its round, stored once, answered when it is durable.

What belongs here: the routes of deliveries, reading and checking a message, its author, and storing it. What does not:
who may deliver and how much at once (`poc_gateway.server.middleware`), and what follows for slots, late items and
callbacks, which `poc_gateway.outbox.ledger` writes in the same transaction.
"""
