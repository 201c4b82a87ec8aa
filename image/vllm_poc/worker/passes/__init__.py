# SPDX-License-Identifier: Apache-2.0
"""How the served model computes for PoC: as vLLM's code says, or with fused operations that give the same.

    plain          vLLM's own forward pass with a hook behind each layer; any device, any attention
    fused          single kernels instead of many small operations, and no KV cache except an FP8 one; CUDA alone
    attention, recurrent, operations, quantisation, experts    what the fused pass puts in place of vLLM's
    pausing        a pass that rests between layers while chat runs
    parity_check   compares passes before one of them is used

A pass changes vLLM's objects while its own forward pass runs, and restores them always: chat never meets a change.
What the forward pass computes on (inputs, seeds) and what becomes of its output is none of its business.
"""
