# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also tells what tests want to know of the worker."""

import hashlib

import torch

from vllm_poc.worker.extension import PocWorkerExtension


class CheckingExtension(PocWorkerExtension):
    """PoC's extension with one method more."""

    def poc_test_kv_checksum(self) -> str:
        """Return a checksum over the KV cache of all layers."""
        digest = hashlib.sha256()
        for cache in self.model_runner.kv_caches:
            digest.update(cache.contiguous().view(torch.uint8).cpu().numpy())
        return digest.hexdigest()
