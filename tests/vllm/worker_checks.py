# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also tells what tests want to know of the worker."""

import hashlib

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from vllm_poc.worker.extension import PocWorkerExtension


class CheckingExtension(PocWorkerExtension):
    """PoC's extension with a few methods more."""

    def poc_test_kv_checksum(self) -> str:
        """Return a checksum over the KV cache of all layers."""
        digest = hashlib.sha256()
        for cache in self.model_runner.kv_caches:
            digest.update(cache.contiguous().view(torch.uint8).cpu().numpy())
        return digest.hexdigest()

    def poc_test_workspace(self) -> tuple[bool, list[int]]:
        """Say whether vLLM's shared workspace is locked, and the addresses of its parts."""
        workspace = current_workspace_manager()
        parts = [part.data_ptr() for part in workspace._current_workspaces if part is not None]
        return workspace.is_locked(), parts
