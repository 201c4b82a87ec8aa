# SPDX-License-Identifier: Apache-2.0
"""Which way of computing is used: the fused one, if this model and device allow it and it gives the same."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm import envs
from vllm_poc.log import get_logger
from vllm_poc.wire.base import Protocol
from vllm_poc.worker.batches import ModelFacts
from vllm_poc.worker.forward import PocModel
from vllm_poc.worker.internals import Runner
from vllm_poc.worker.recipe import Recipe

_log = get_logger(__name__)

_TRIAL = Recipe(Protocol.ARTIFACT, seq_len=16, k_dim=1, strong_rng=False, layer_hooks=True, sign_flips=False)
_TRIAL_NONCES = 4
#: Relative distance of two ways' hidden states. Rounding makes 0.02; a part that is left out or done twice, 1.
_TOLERANCE = 0.2


def poc_model(runner: Runner, limits: ModelFacts) -> PocModel:
    """Return the model for PoC. Runs it once in each way, together with all other ranks."""
    if runner.device.type != "cuda" or getattr(envs, "VLLM_BATCH_INVARIANT", False):
        # vLLM's own operations are then the only ones that do not depend on the batch.
        return PocModel(runner, limits)
    from vllm_poc.worker.fusion.fused import FusedPass  # noqa: PLC0415 - needs Triton

    plain, fused = PocModel(runner, limits), PocModel(runner, limits, FusedPass(runner))
    with runner.ranks.together():
        distance = _distance(_trial(fused), _trial(plain))
    if runner.ranks.all(distance <= _TOLERANCE):
        return fused
    _log.warning("PoC runs unfused, and slower: with fused operations the model differs by %.2g", distance)
    return plain


def _trial(model: PocModel) -> Tensor | None:
    model.tensors.load("trial", _TRIAL)
    seeds = torch.arange(_TRIAL_NONCES * (_TRIAL.input_columns + 1), device=model.runner.device)
    with torch.inference_mode():
        inputs = model.inputs(_TRIAL, seeds.view(_TRIAL_NONCES, -1)) if model.runner.ranks.has_first_layer else None
        return model.last_hidden(_TRIAL, inputs, _TRIAL_NONCES)


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0  # another stage has the output
    return float((found.float() - expected.float()).norm() / expected.float().norm())
