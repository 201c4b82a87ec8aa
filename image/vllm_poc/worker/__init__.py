# SPDX-License-Identifier: Apache-2.0
"""What runs in vLLM's worker processes, one per GPU: from a batch request to its results.

    extension      methods that the server calls; chooses the fused pass or vLLM's own
    model_runner   a batch on all ranks: fits it into memory, steps it through the stages of a pipeline
    decoding       the decode scheme: the chains that are under way
    chain_batch    their forward passes, part by part          chain_trial   how they are computed here
    warm_up        makes a pass ready for repetition, and times it
    batch_queue    requests on their way through the stages
    graphs         captured passes          memory    what fits
    results        seeds, what a block hash decides, results
    passes/        how the served model computes for PoC
    model/         all that reads the served model and vLLM's runner

Each imports only those below it. Nothing here knows HTTP, rounds or callbacks; when work runs is decided by
`vllm_poc.server.scheduler`. Only ``passes`` and ``model`` import vLLM.
"""
