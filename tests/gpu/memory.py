# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also tells how much device memory is in use."""

import torch

from vllm_poc.worker.extension import PocWorkerExtension


class MemoryExtension(PocWorkerExtension):
    """PoC's extension with one method more."""

    def poc_test_memory(self) -> dict[str, int]:
        """Return the bytes of PyTorch's tensors, those it has taken from the device, and those free there."""
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": torch.cuda.mem_get_info()[0],
        }
