# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM mixes into its worker (``--worker-extension-cls``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm_poc.worker.batches import BatchRequest, BatchResult, Failure, ModelFacts, Rehearsal
from vllm_poc.worker.choice import chosen
from vllm_poc.worker.forward import PocModel
from vllm_poc.worker.internals import Runner, UnsupportedModelError
from vllm_poc.worker.limits import model_facts, refusal
from vllm_poc.worker.ranks import OtherRankError, Ranks

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
        return _answer(lambda: self._poc_together(lambda model: model.prepare(request)))

    def poc_rehearse(self, request: BatchRequest, part_seconds: float) -> Rehearsal | Failure:
        """Prepare forward passes of as many nonces as the request has together with all other ranks.

        On a GPU in parts of up to ``part_seconds``, if one takes longer.
        """
        return _answer(lambda: self._poc_together(lambda model: model.prepare_rehearsal(request, part_seconds)))

    def _poc_facts(self) -> ModelFacts:
        try:
            return self._poc().facts
        except UnsupportedModelError as error:
            return {**model_facts(self.model_runner.vllm_config), "refusal": str(error)}
        except OtherRankError:  # which says why
            return model_facts(self.model_runner.vllm_config)

    def _poc_together(self, prepare: Callable[[PocModel], Callable[[], T]]) -> T:
        return self._poc_prepared(lambda: prepare(self._poc()))()

    def _poc(self) -> PocModel:
        if self._poc_model is None:
            self._poc_model = chosen(self._poc_prepared(self._poc_plain)())
        return self._poc_model

    def _poc_plain(self) -> Callable[[], PocModel]:
        config = self.model_runner.vllm_config
        reason = refusal(config, self.model_runner.get_model())
        if reason is not None:
            raise UnsupportedModelError(reason)
        runner = Runner(self.model_runner, getattr(self, "peak_activation_memory", 0))  # measured on GPUs alone
        model = PocModel(runner, model_facts(config))
        return lambda: model

    def _poc_prepared(self, prepare: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Do what a rank can do alone; OtherRankError if another one fails in that."""
        ranks = Ranks()
        try:
            prepared = prepare()
        except Exception:
            ranks.agree(ready=False)
            raise
        ranks.agree(ready=True)
        return prepared


def _answer(call: Callable[[], T]) -> T | Failure:
    try:
        return call()
    except Exception as error:
        return Failure(error=f"{type(error).__name__}: {error}")
