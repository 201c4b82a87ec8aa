# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM mixes into its worker (``--worker-extension-cls``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm_poc.worker.batches import BatchRequest, BatchResult, Failure, ModelFacts, Rehearsal
from vllm_poc.worker.choice import poc_model
from vllm_poc.worker.forward import PocModel
from vllm_poc.worker.internals import Runner, UnsupportedModelError
from vllm_poc.worker.limits import model_facts, refusal
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
        """Compute the request together with all other ranks."""
        return _answer(lambda: self._poc_result(request))

    def poc_rehearse(self, request: BatchRequest) -> Rehearsal | Failure:
        """Prepare batches of as many nonces as the request has, and say how long one takes."""
        return _answer(lambda: self._poc().rehearse(request))

    def _poc_facts(self) -> ModelFacts:
        facts = model_facts(self.model_runner.vllm_config)
        try:
            model = self._poc()
            facts["scratch_bytes"] = model.scratch_bytes
            facts["fused"] = model.fused
        except UnsupportedModelError as error:
            facts["refusal"] = str(error)
        return facts

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
            config = self.model_runner.vllm_config
            reason = refusal(config, self.model_runner.get_model())
            if reason is not None:
                raise UnsupportedModelError(reason)
            self._poc_model = poc_model(Runner(self.model_runner), model_facts(config))
        return self._poc_model


def _answer(call: Callable[[], T]) -> T | Failure:
    try:
        return call()
    except Exception as error:
        return Failure(error=f"{type(error).__name__}: {error}")
