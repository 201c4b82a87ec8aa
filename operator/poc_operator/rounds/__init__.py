# SPDX-License-Identifier: Apache-2.0
"""What to do next for a round: a pure function of the round, its pods, their reports, the gateway and the time.

``plan`` is the chain of policies; each other module is one subject of it. No client is imported, and there is no clock,
so every decision is tested as a table. What all kinds share, as deadlines and conditions, is in ``planning``, with the
states of a round.

A slot is one residue class of the round's nonces. Its states (`SlotState`)::

    Waiting ──bound──► Starting ──confirmed──► Running ──stopped, at its end──► Done
       ▲                  │  ▲                    │ │
       │ refused, taken   │  └── stopped by ──────┤ │ no progress, or silent
       ├──────────────────┘      somebody         │ ▼
       ├── pod gone, server ended, failed ────────┘ Stalled ── stopped ──► Starting      (lost too often: Failed)
       │                                            │ silent until its lease has run out
       ├────────────────────────────────────────────┘
       └── stopped, its lease run out, or gone ── Leaving ◄── pod deleted or not selected, from each state of a pod
"""
