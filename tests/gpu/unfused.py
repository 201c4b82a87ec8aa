# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also computes by vLLM's own forward pass, every operation by itself."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from vllm.model_executor.custom_op import CustomOp

from tests.gpu.chain_checks import ChainExtension
from tests.gpu.memory import MemoryExtension
from tests.vllm.worker_checks import CheckingExtension
from vllm import ir
from vllm_poc.rpc import BatchRequest, BatchResult
from vllm_poc.worker.model.capabilities import model_facts
from vllm_poc.worker.model_runner import PocModelRunner
from vllm_poc.worker.passes.plain import Patch, patched


class UnfusedExtension(ChainExtension, MemoryExtension, CheckingExtension):
    """PoC's extension with a few methods more."""

    def poc_test_own(self, request: BatchRequest) -> BatchResult | None:
        """Answer as ``poc_compute``, by vLLM's own kernels."""
        adapter = self._poc().stage.adapter
        compute = PocModelRunner(adapter, model_facts(self.model_runner.vllm_config)).prepare(request)
        for _ in range(adapter.ranks.stages):  # each call takes it through one of them
            result = compute()
        torch.cuda.empty_cache()
        return result

    def poc_test_unfused(self, request: BatchRequest) -> BatchResult | None:
        """Answer the same, each operation by itself."""
        with unfused(self._poc().stage.adapter.model):
            return self.poc_test_own(request)


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Let the model run the operations that vLLM's kernels and compiler would fuse."""
    # vLLM's own form of what mixes several streams leaves out the norm that its kernel has within.
    operations = [module for module in model.modules() if isinstance(module, CustomOp) and not _mixes_streams(module)]
    with ExitStack() as stack:
        stack.enter_context(patched(Patch(module, "_forward_method", module.forward_native) for module in operations))
        for operation in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            stack.enter_context(operation.set_priority(["native"]))
        stack.enter_context(ir.enable_torch_wrap(False))
        yield


def _mixes_streams(module: nn.Module) -> bool:
    return type(module).__name__.startswith("MHC")
