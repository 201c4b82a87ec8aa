# SPDX-License-Identifier: Apache-2.0
"""A worker extension that lets GLM-5.3's linear attention run on a CPU, where vLLM has no kernels for it.

The functions below STAND IN for kernels. They read and write what those do, by the same metadata, one token after the
other; that they compute the same numbers is not shown here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.models.glm5next.common import kda

from tests.vllm.engine_checks import EngineExtension


class RecurrentExtension(EngineExtension):
    """PoC's extension over the stand-ins."""

    _poc_refuses_unproven = False


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,  # noqa: ANN401 - what kernels precompute
) -> Tensor:
    """``x`` ``[channels, tokens]``, ``weight`` ``[channels, width]``; states ``[blocks, channels, width - 1]``."""
    out, before = torch.empty_like(x), weight.shape[1] - 1
    for place, known, (start, end) in zip(
        cache_indices.tolist(), has_initial_state.tolist(), _spans(query_start_loc), strict=True
    ):
        if place == 0:  # no block at all
            continue
        state = conv_states[place] if known else torch.zeros_like(conv_states[place])
        padded = torch.cat((state, x[:, start:end]), dim=1)
        windows = padded.float().unfold(1, before + 1, 1)
        out[:, start:end] = torch.nn.functional.silu((windows * weight.float()[:, None]).sum(dim=2)).to(x.dtype)
        conv_states[place] = padded[:, -before:]
    return out


def _convolve_step(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, conv_state_indices: Tensor
) -> Tensor:
    """``x`` ``[sequences, channels]``, one token of each; states as above."""
    places = conv_state_indices.long()
    padded = torch.cat((states[places], x.unsqueeze(2)), dim=2)
    states[places] = padded[:, :, 1:]
    return torch.nn.functional.silu((padded.float() * weight.float()).sum(dim=2)).to(x.dtype)


def _gather(states: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    return torch.where(has_initial_state.view(-1, 1, 1, 1), states[indices.long()], 0)


class _Scatter:
    def __call__(self, states: Tensor, values: Tensor, indices: Tensor) -> None:
        states[indices.long()] = values.to(states.dtype)

    def register_warmup(self, **_: object) -> None:
        """Do nothing: there is no kernel to compile."""


def _recur(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,  # noqa: N803 - vLLM's name
    g_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    lower_bound: float,
    **_: Any,  # noqa: ANN401 - flags that are the same in all calls
) -> tuple[Tensor, Tensor]:
    """Queries, keys and values ``[1, tokens, heads, columns]``; states ``[sequences, heads, columns, columns]``."""
    heads, columns = q.shape[2:]
    queries, keys = (torch.nn.functional.normalize(part[0].float(), dim=-1) for part in (q, k))
    decay = lower_bound * torch.sigmoid(A_log.view(heads, 1).exp() * (raw_g[0].float() + g_bias.view(heads, columns)))
    out, last = torch.empty_like(v), initial_state.float().clone()
    for state, (start, end) in zip(last, _spans(cu_seqlens), strict=True):
        for token in range(start, end):
            state.mul_(decay[token].exp()[:, None])
            change = v[0, token].float() - torch.einsum("hvk,hk->hv", state, keys[token])
            state.add_(torch.einsum("hv,hk->hvk", beta[0, token, :, None] * change, keys[token]))
            out[0, token] = torch.einsum("hvk,hk->hv", state, queries[token] * columns**-0.5).to(v.dtype)
    return out, last


def _recur_step(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    out: Tensor | None,
    a_log: Tensor,
    g_bias: Tensor,
    lower_bound: float,
    **_: Any,  # noqa: ANN401 - flags that are the same in all calls
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, and its entry among the states ``initial_state``, which changes."""
    places = ssm_state_indices.long()
    made, last = _recur(
        q=q,
        k=k,
        v=v,
        raw_g=g,
        beta=beta.float().sigmoid(),
        A_log=a_log,
        g_bias=g_bias,
        initial_state=initial_state[places],
        cu_seqlens=torch.arange(len(places) + 1),
        lower_bound=lower_bound,
    )
    initial_state[places] = last.to(initial_state.dtype)
    return (out.copy_(made) if out is not None else made), initial_state


def _spans(starts: Tensor) -> list[tuple[int, int]]:
    return list(zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True))


kda.causal_conv1d_fn = _convolve
kda.causal_conv1d_update = _convolve_step
kda.gather_initial_states = _gather
kda.scatter_states = _Scatter()
kda.chunk_kda_with_fused_gate = _recur
kda.fused_recurrent_kda = _recur_step
