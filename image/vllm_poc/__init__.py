# SPDX-License-Identifier: Apache-2.0
"""Proof of Compute inside a stock vLLM server.

The folders, each importing only those named before it:

- ``wire``: the REST contract; imports neither torch nor vLLM, so that the operator shares it.
- ``maths``: every formula of the protocol, batched over nonces; needs torch only.
- ``worker``: what runs in vLLM's worker processes: the scratch KV cache and the forward pass.
- ``server``: what runs in vLLM's API server process: routes, round state, callbacks.
"""
