# SPDX-License-Identifier: Apache-2.0
"""The routes that the network's own client calls, one module per area; an init becomes a PoCRound.

What belongs here: which ML node a request is for (`ml_nodes`, `base_url`), the routes by area (`round_routes`,
`generate_routes`, `node`), and chat to the pods (`chat`). Behind them stands `service`: the ML node's PoCRounds
(`create_pocround`), named nonces as `jobs` that are dispatched to pods and stored by `job_store`, and callbacks that
are sent once more (`callback_relay`).
What does not: results of rounds, which pods deliver to `poc_gateway.ingest`, and posting callbacks, which
`poc_gateway.outbox` does.

A job of ``POST generate``::

    queued ── a pod has begun a chunk ──> running ──┬──> completed: its result, and callbacks in the ledger
       ^                                     │      ├──> failed: the request is at fault, ten pods in a row, or a day
       │                                     │      └──> cancelled: by ``DELETE generate/ID``
       └──────── the gateway restarts ───────┘

A result is forgotten after its time, with the callbacks that have gone out.
"""
