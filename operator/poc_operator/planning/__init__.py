# SPDX-License-Identifier: Apache-2.0
"""What the plans of all kinds share: snapshots and steps, pods that can work, waiting, ends, conditions, samples.

A plan is a chain of policies. Each takes a `Snapshot` (the object, its pods, their reports, the time) and the `Step`
so far (status, actions, events), and returns the next step. There is no I/O and no clock. What only one kind needs
belongs into ``rounds``, ``validations`` or ``calibrations``. ``reaping`` judges what pods compute for nobody.

`eligibility` says which pods can work, load, or never will, `queue` which round gets a pod that several want.
`lifecycle`, `conditions`, `waiting` and `samples` are parts of the chains.

States of every kind (`State`)::

    Pending ──► Running ──► Stopping ──► Complete | Failed
       │          │ ▲           ▲
       │  suspend │ │ resume    │ outcome: done, a deadline, given up, deleted
       ▼          ▼ │           │
      Suspending ──► Suspended ─┘

States of a sample, for validations and calibrations: ``Waiting ──► Running ──► Done``, back to ``Waiting`` when its pod
is gone or answers with an error, and ``Failed`` when that happened too often.
"""
