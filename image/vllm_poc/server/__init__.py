# SPDX-License-Identifier: Apache-2.0
"""What runs in vLLM's API server process: routes, the round and its deliveries, and when PoC may use the engine.

    app           the ASGI middleware that vLLM loads: token, body, when the engine is ready
    routes        the REST routes            service      executes them
    bodies        large ones, off the event loop
    admission     what is refused before work begins
    phases        the one round, its phases  generation   computes a slot
    clock         what waits for a time, and how long a round runs that nobody asks for
    jobs          named nonces, verdicts     callbacks/   results on their way to receivers
    scheduler     slices                     autotune     how many nonces a forward pass holds
    description   what the workers say of the model
    chains        the decode scheme in slices, and whether this server computes it
    gate          when a slice may begin: chat first
    vllm_routes   vLLM's own routes: what waits where PoC goes first, and what lets PoC pause
    commands      what one of those routes is told, by whom
    engine        vLLM's engine and its workers, called by `vllm_poc.rpc`
    termination   a server that is told to end drains first
    nvml          the GPUs, as their driver tells of them
    status, metrics, errors

Neither torch nor vLLM is imported here: formulas are in `vllm_poc.maths`, forward passes in `vllm_poc.worker`.
"""
