# SPDX-License-Identifier: Apache-2.0
"""Proof of Compute inside a stock vLLM server.

    wire/      the REST contract, shared with operator and gateway; neither torch nor vLLM
    rpc        messages between the API server's process and the workers
    maths/     every formula of the protocol; torch alone      kernels/   the same and more in Triton
    server/    what runs in vLLM's API server process: routes, round state, scheduling, callbacks
    worker/    what runs in vLLM's worker processes: forward passes on scratch memory, CUDA graphs
    settings       the environment of a server     start_checks   release and settings, before a model is loaded
    cli        ``python -m vllm_poc serve MODEL``      download   ``python -m vllm_poc download MODEL``

vLLM loads two of its classes by official hooks: `vllm_poc.server.app.PocMiddleware` and
`vllm_poc.worker.extension.PocWorkerExtension`. Server and workers know each other by ``rpc`` alone.
"""
