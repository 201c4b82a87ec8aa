# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: what `vllm_poc.maths` and vLLM's layers compute, in one pass over the data. Need a GPU.

    random_normal  inputs and seeded vectors
    attention      causal attention of short sequences
    layers         norms, gate, rotation, reflection, quantisation      row_sums  their sums
    joint_norm     a norm over all heads of a token, and the rotation of a part of each
    router         the product of a router whose weights are float32
    packed_experts products with experts whose weights are numbers of 4 bits
    kv_cache       keys and values into an FP8 KV cache

They round where the unfused operations round, so that both give the same numbers. Which operation of vLLM one of them
stands for is decided in `vllm_poc.worker.passes`.
"""
