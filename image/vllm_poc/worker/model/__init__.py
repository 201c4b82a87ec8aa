# SPDX-License-Identifier: Apache-2.0
"""All that reads vLLM's internals to know the served model. A new release of vLLM is met here and in ``passes``.

    adapter        layers, attention's plan of a batch, the base model's forward pass on given inputs
    base_model     that model without what is chat's: adapters, the KV connector, statistics of experts
    capabilities   what the configuration allows, and why it may forbid PoC
    flags          vLLM's flags: those with which PoC is not proven, and those that may change results
    ranks          tensor and pipeline parallel ranks
    scratch        the KV cache that PoC writes instead of chat's, and the metadata that finds a batch in its blocks
    placement      which blocks of a cache the chains of the decode scheme have
    chain_cache    the caches of these chains, which stay from step to step, and what tells attention of a step
    layer_subset   forward passes through a few of the layers

What replaces vLLM's operations is in `vllm_poc.worker.passes`.
"""
