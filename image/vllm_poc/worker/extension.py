# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM mixes into its worker (``--worker-extension-cls``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm_poc.worker.batches import BatchRequest, BatchResult, Failure, ModelFacts
from vllm_poc.worker.forward import PocModel
from vllm_poc.worker.internals import Runner, UnsupportedModelError
from vllm_poc.worker.limits import Limits, refusal
from vllm_poc.worker.ranks import Ranks

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

T = TypeVar("T")


class PocWorkerExtension:
    """PoC methods of a worker, called by name through ``AsyncLLM.collective_rpc``.

    vLLM refuses an extension that shares a name with its worker, hence the prefix.
    """

    model_runner: GPUModelRunner  # of vLLM's worker
    _poc_model: PocModel | None = None

    def poc_describe(self) -> ModelFacts | Failure:
        """Say what the model allows; the first call allocates the scratch cache."""
        return _answer(self._poc_facts)

    def poc_compute(self, request: BatchRequest) -> BatchResult | Failure | None:
        """Compute one batch together with all other ranks."""
        return _answer(lambda: self._poc_result(request))

    def _poc_facts(self) -> ModelFacts:
        scratch_bytes, reason = 0, None
        try:
            scratch_bytes = self._poc().scratch_bytes
        except UnsupportedModelError as error:
            reason = str(error)
        limits = self._poc_limits()
        return ModelFacts(
            hidden_size=limits.hidden_size,
            num_layers=limits.num_layers,
            max_model_len=limits.max_model_len,
            max_batch_tokens=limits.max_batch_tokens,
            max_batch_nonces=limits.max_batch_nonces,
            scratch_bytes=scratch_bytes,
            refusal=reason,
        )

    def _poc_result(self, request: BatchRequest) -> BatchResult | None:
        ranks = Ranks()
        try:
            forward = self._poc().prepare(request)
        except Exception:
            ranks.agree(ready=False)
            raise
        ranks.agree(ready=True)
        return forward()

    def _poc(self) -> PocModel:
        if self._poc_model is None:
            reason = refusal(self.model_runner.vllm_config, self.model_runner.get_model())
            if reason is not None:
                raise UnsupportedModelError(reason)
            self._poc_model = PocModel(Runner(self.model_runner), self._poc_limits())
        return self._poc_model

    def _poc_limits(self) -> Limits:
        return Limits.of(self.model_runner.vllm_config)


def _answer(call: Callable[[], T]) -> T | Failure:
    try:
        return call()
    except Exception as error:
        return Failure(error=f"{type(error).__name__}: {error}")
