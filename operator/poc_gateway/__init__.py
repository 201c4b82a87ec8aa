# SPDX-License-Identifier: Apache-2.0
"""The gateway: a durable collector of what pods deliver, and the network's own routes in front of the cluster.

    pods ──> ingest ──> store <── query <── operator, people
                          ^
             outbox ──────┘ ──> the rounds' receivers
                          ^
    network ──> node_api ─┘ ──> PoCRounds, and named nonces on free pods

`server` puts them together, by port. Each package says what belongs in it and what does not; import-linter holds the
order: server, node_api, query and ingest, outbox, errors and metrics, store, settings.
"""

#: The release that this is, as in ``pyproject.toml``: an image has no package metadata.
__version__ = "0.1.0"
