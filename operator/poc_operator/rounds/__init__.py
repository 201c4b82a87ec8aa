# SPDX-License-Identifier: Apache-2.0
"""What to do next for a round: a pure function of the round, its pods, their reports and the time.

``plan()`` in ``plan`` is the chain of policies; each other module is one subject of it. There is no I/O and no clock
here, and no client is imported, so every decision is tested as a table.

A round's states::

    Pending ──► Running ──► Stopping ──► Complete | Failed
       │          │ ▲           ▲
       │  suspend │ │ resume    │ outcome: enough, finish, a deadline, given up
       ▼          ▼ │           │
      Suspending ──► Suspended ─┘

A slot's states (`SlotState`)::

    Waiting ──bound──► Starting ──confirmed──► Running ──stopped, at its end──► Done
       ▲                  ▲  ▲                    │ │
       │ pod gone         │  └──── lost, again ───┘ │ no progress, or silent
       ├──────────────────┘                         ▼
       └────────────────── stopped ◄──────────── Stalled          (lost too often: Failed)
"""
