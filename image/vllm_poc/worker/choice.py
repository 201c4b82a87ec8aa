# SPDX-License-Identifier: Apache-2.0
"""Which way of computing is used: the fused one, if this model and device allow it and it gives the same."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm import envs
from vllm_poc.logs import get_logger
from vllm_poc.worker.forward import PocModel
from vllm_poc.worker.internals import Runner
from vllm_poc.worker.limits import fused_facts
from vllm_poc.worker.trial import TRIAL_TOKENS, trial

_log = get_logger(__name__)

#: Relative distance of two ways' hidden states. Rounding makes 0.02; a part that is left out or done twice, 1.
_TOLERANCE = 0.2
#: Settings of vLLM that need its own operations: they alone do not depend on the batch; graphs would share memory.
_SETTINGS = ("VLLM_BATCH_INVARIANT", "VLLM_USE_NCCL_SYMM_MEM")


def chosen(plain: PocModel) -> PocModel:
    """Return the model for PoC, the same on all ranks: a fused one or ``plain``. On a GPU, runs it in each way."""
    runner = plain.stage.runner
    if not runner.ranks.agreed(_is_possible(runner)):
        return plain
    return _fused(runner, plain) or plain


def _is_possible(runner: Runner) -> bool:
    if runner.device.type != "cuda" or any(getattr(envs, name, False) for name in _SETTINGS):
        return False
    try:
        from vllm_poc.worker.fusion.attention import attention_layers, needs_no_cache  # noqa: PLC0415

        return needs_no_cache(attention_layers(runner))
    except Exception:
        _log.exception("PoC computes without fused operations, and slower, since it does not know this attention")
        return False


def _fused(runner: Runner, plain: PocModel) -> PocModel | None:
    fused = _prepared(runner, plain)
    if not runner.ranks.agreed(fused is not None) or fused is None:
        return None
    with fused.memory.learning(TRIAL_TOKENS):
        found = trial(fused.stage)
    expected = trial(plain.stage)
    if found is None or expected is None:
        return None
    distances = _distances(found, expected)
    if runner.ranks.agreed(all(distance <= _TOLERANCE for distance in distances)):  # NaN is not
        return fused
    _log.warning("PoC computes without fused operations, and slower: with them results are %s away", distances)
    return None


def _prepared(runner: Runner, plain: PocModel) -> PocModel | None:
    try:
        from vllm_poc.worker.fusion.fused import FusedPass  # noqa: PLC0415 - needs Triton

        limits = fused_facts(plain.stage.limits, experts=runner.has_experts)
        return PocModel(runner, limits, FusedPass(runner))
    except Exception:
        _log.exception("PoC computes without fused operations, and slower, since it cannot prepare them")
        return None


def _distances(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]
