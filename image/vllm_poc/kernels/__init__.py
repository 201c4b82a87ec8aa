# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: what `vllm_poc.maths` and vLLM's layers compute, in one pass over the data. Need a GPU.

They round where the unfused operations round, so that both give the same numbers.
"""
