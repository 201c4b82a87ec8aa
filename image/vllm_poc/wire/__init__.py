# SPDX-License-Identifier: Apache-2.0
"""The one contract between operator, gateway, pods and receivers.

- ``messages``: requests about a round. ``answers``: its status, the answers to commands, and errors.
- ``generate``: the same for named nonces: ``POST generate`` and ``POST validate``.
- ``callbacks``: what pods post to receivers.
- ``client_gone``: what both servers do when a client that waits goes away.
- ``artifacts``: vectors as text. ``partition``: which nonces a slot has.
- ``stat_test``: what a mismatch is, and when it is fraud. ``chain_verdict``: the same for chains of the decode scheme.

Imports neither torch nor vLLM, so the operator installs it without a GPU stack and the two sides cannot drift
apart. What only the pod's own processes say to each other is in `vllm_poc.rpc`.
"""
