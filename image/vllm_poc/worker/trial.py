# SPDX-License-Identifier: Apache-2.0
"""A small batch that is computed in two ways before one of them is chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_poc.logs import get_logger
from vllm_poc.wire.messages import Protocol
from vllm_poc.worker.internals import StageOutput
from vllm_poc.worker.recipe import Recipe
from vllm_poc.worker.stage import Stage

_log = get_logger(__name__)

_NONCES = 4
#: Short and long sequences have other kernels.
_RECIPES = tuple(
    Recipe(Protocol.ARTIFACT, seq_len=seq_len, k_dim=1, strong_rng=False, layer_hooks=True, sign_flips=False)
    for seq_len in (64, 128)
)
#: Tokens of the largest batch.
TRIAL_TOKENS = _NONCES * max(recipe.seq_len for recipe in _RECIPES)


def trial(stage: Stage) -> list[Tensor] | None:
    """Return the hidden states of small batches, on all ranks together; none of them if another stage has them.

    None if a rank failed, and thus all that share its stage.
    """
    found = []
    for recipe in _RECIPES:
        succeeded, hidden = _through_all_stages(stage, recipe)
        if not succeeded:
            return None
        found += [hidden.float()] if hidden is not None else []
    return found


def _through_all_stages(stage: Stage, recipe: Recipe) -> tuple[bool, Tensor | None]:
    """Compute stage by stage: nobody waits for what a stage that failed would have sent."""
    ranks, output = stage.runner.ranks, None
    for turn in range(ranks.stages):
        if isinstance(output, dict):
            ranks.send(output)
            output = None
        mine = ranks.stage == turn
        if mine:
            output = _output(stage, recipe, ranks.receive())
        # Before anything waits for the device, where another rank may have left this one within a collective.
        if not ranks.in_step((output is not None) if mine else None):
            return False, None
    return True, output if isinstance(output, Tensor) else None


def _output(stage: Stage, recipe: Recipe, received: dict[str, Tensor]) -> StageOutput | None:
    try:
        with torch.inference_mode():
            stage.load("trial", recipe)
            seeds = torch.arange(_NONCES * (recipe.input_columns + 1), device=stage.runner.device)
            inputs = stage.inputs(recipe, seeds.view(_NONCES, -1))
            return stage.forward(recipe, inputs, received, _NONCES)
    except Exception:
        _log.exception("PoC computes without fused operations, and slower, since they fail here")
        return None
