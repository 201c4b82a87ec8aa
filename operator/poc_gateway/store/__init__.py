# SPDX-License-Identifier: Apache-2.0
"""The database: the engine, the tables, the one writer, the rounds, and what is deleted when.

What belongs here: everything that must be the same for SQLite and PostgreSQL, and what several packages read.
What does not: the tables' meaning for one package, which reads or writes them with its own statements. Slots, late
items and callbacks change through the ledger of `poc_gateway.outbox` alone.

A round's row::

    (none) ── first delivery ──> kept ── due for deletion ──> being deleted ── its rows are gone ──> (none)
"""
