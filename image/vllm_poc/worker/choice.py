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
from vllm_poc.worker.fusion.attention import attention_layers, needs_no_cache
from vllm_poc.worker.internals import Runner
from vllm_poc.worker.recipe import Recipe

_log = get_logger(__name__)

_TRIAL = Recipe(Protocol.ARTIFACT, seq_len=16, k_dim=1, strong_rng=False, layer_hooks=True, sign_flips=False)
_TRIAL_NONCES = 4
#: Relative distance of two ways' hidden states. Rounding makes 0.02; a part that is left out or done twice, 1.
_TOLERANCE = 0.2


def poc_model(runner: Runner, limits: ModelFacts) -> PocModel:
    """Return the model for PoC. On a GPU, runs it once in each way."""
    plain = PocModel(runner, limits)
    # With VLLM_BATCH_INVARIANT, vLLM's own operations are the only ones that do not depend on the batch.
    if runner.device.type != "cuda" or envs.VLLM_BATCH_INVARIANT or not runner.ranks.alone:
        return plain
    try:
        return _fused(runner, limits, plain) if needs_no_cache(attention_layers(runner)) else plain
    except Exception:
        _log.exception("PoC computes without fused operations, and slower, since they fail here")
        return plain


def _fused(runner: Runner, limits: ModelFacts, plain: PocModel) -> PocModel:
    from vllm_poc.worker.fusion.fused import FusedPass  # noqa: PLC0415 - needs Triton

    fused = PocModel(runner, limits, FusedPass(runner))
    distance = _distance(_trial(fused), _trial(plain))
    if distance <= _TOLERANCE:
        return fused
    _log.warning("PoC computes without fused operations, and slower: with them results are %.2g away", distance)
    return plain


def _trial(model: PocModel) -> Tensor:
    model.tensors.load("trial", _TRIAL)
    seeds = torch.arange(_TRIAL_NONCES * (_TRIAL.input_columns + 1), device=model.runner.device)
    with torch.inference_mode():
        inputs = model.inputs(_TRIAL, seeds.view(_TRIAL_NONCES, -1))
        hidden = model.last_hidden(_TRIAL, inputs, _TRIAL_NONCES)
    assert hidden is not None  # noqa: S101 - the only rank has all layers
    return hidden.float()


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
