# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also computes chains of the decode scheme in other ways."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from vllm_poc.maths import decode
from vllm_poc.maths.sampling import fill_inputs, input_seeds, layer_vectors, token_ids, token_seed
from vllm_poc.rpc import DecodeRequest
from vllm_poc.worker.decoding import Decoder
from vllm_poc.worker.extension import PocWorkerExtension
from vllm_poc.worker.model.adapter import StageInputs
from vllm_poc.worker.model.capabilities import model_facts
from vllm_poc.worker.model.scratch import BatchShape
from vllm_poc.worker.model_runner import PocModelRunner
from vllm_poc.worker.passes.plain import SeededRouters, find_routers


class ChainExtension(PocWorkerExtension):
    """PoC's extension with a few methods more."""

    def poc_test_captures(self) -> bool:
        """Whether decode steps become CUDA graphs."""
        return self._poc_test_decoder().captures

    def poc_test_steps_one_by_one(self) -> bool:
        """Let decode steps run as they do where they cannot be captured, and say so."""
        self._poc_test_decoder().start_steps_one_by_one()
        return not self._poc_test_decoder().captures

    def poc_test_chains_at_once(self, request: DecodeRequest) -> dict[str, list[list[float]]]:
        """Return the indices and margins of chains whose claims are whole, each by one pass over all of its tokens.

        It is vLLM's own, over a cache that nothing was in before, for as many chains as the server's batches hold.
        """
        tokens = request["seq_len"] + request["max_tokens"]
        most = max(1, model_facts(self.model_runner.vllm_config)["max_batch_tokens"] // tokens)
        found: dict[str, list[list[float]]] = {"indices": [], "margins": []}
        for start in range(0, len(request["nonces"]), most):
            part = slice(start, start + most)
            some = {**request, "nonces": request["nonces"][part], "forced": request["forced"][part]}
            for name, rows in self._poc_test_pass(cast("DecodeRequest", some)).items():
                found[name] += rows
        return found

    def _poc_test_pass(self, request: DecodeRequest) -> dict[str, list[list[float]]]:
        adapter = self._poc().stage.adapter
        stage = PocModelRunner(adapter, model_facts(self.model_runner.vllm_config)).stage
        hidden, device = stage.limits["hidden_size"], adapter.device
        nonces, first, steps = len(request["nonces"]), request["seq_len"], request["max_tokens"]
        claims = torch.tensor(request["forced"], device=device)
        bases = torch.tensor([input_seeds(*_names(request), n, strong_rng=False)[0] for n in request["nonces"]])
        bases = bases.to(device)
        shape = BatchShape(nonces, first + steps)
        vectors = layer_vectors(
            block_hash=request["block_hash"], num_layers=len(adapter.layers), hidden=hidden, device=device
        )
        routers = SeededRouters(find_routers(adapter.layers), adapter.experts, adapter.experts_per_token)
        with torch.inference_mode():
            logits = _logits(request, routers, shape, device)
            inputs = _inputs(bases, claims, shape, first, hidden, adapter.dtype)
            vocabulary = adapter.vocabulary
            tokens = _tokens(request, bases, claims, vocabulary) if vocabulary is not None else None
            with stage._bound(shape):
                plan = stage.pass_.plan(shape)
                reflected = dict(zip(adapter.layers, vectors, strict=True))
                with stage.pass_.applied(reflected, shape), routers.choosing(logits, 1):
                    output = adapter.forward(StageInputs(inputs, tokens), {}, plan)
            assert isinstance(output, Tensor)
            states = output.view(*shape, hidden)[:, first - 1 :]
            return self._poc_test_snapped(request, bases, claims, states)

    def _poc_test_snapped(
        self, request: DecodeRequest, bases: Tensor, claims: Tensor, states: Tensor
    ) -> dict[str, list[list[float]]]:
        seeds = [decode.prefill_pick_seed(*_names(request), nonce) for nonce in request["nonces"]]
        hidden, points, margins = states.shape[-1], list[Tensor](), list[Tensor]()
        for step in range(states.shape[1]):
            if step == 0:
                picks = decode.picks(torch.tensor(seeds, device=bases.device), hidden=hidden)
            else:
                picks = decode.step_picks(bases, claims[:, step - 1], step=step, hidden=hidden)
            snapped = decode.snap(states[:, step], picks, self._poc_test_decoder()._model.points)
            points.append(snapped.points)
            margins.append(decode.claimed_margins(snapped.scores, claims[:, step]))
        return {"indices": torch.stack(points, dim=1).tolist(), "margins": torch.stack(margins, dim=1).tolist()}

    def _poc_test_decoder(self) -> Decoder:
        assert self._poc_decoder is not None
        return self._poc_decoder


def _names(request: DecodeRequest) -> tuple[str, str]:
    return request["block_hash"], request["public_key"]


def _logits(request: DecodeRequest, routers: SeededRouters, shape: BatchShape, device: torch.device) -> Tensor:
    """Return what all routers say of each token: those of the prefill are step 0."""
    steps = (torch.arange(shape.seq_len, device=device) - request["seq_len"] + 1).clamp_(min=0).repeat(shape.nonces)
    seeds = torch.tensor(
        [
            [decode.route_seed(request["block_hash"], nonce, number) for nonce in request["nonces"]]
            for number in range(len(routers.routers))
        ],
        dtype=torch.int64,
        device=device,
    ).view(len(routers.routers), shape.nonces)
    seeds = seeds.repeat_interleave(shape.seq_len, dim=1)
    return decode.seeded_logits(seeds, steps, experts=routers.experts, top_k=routers.top_k)


def _inputs(bases: Tensor, claims: Tensor, shape: BatchShape, first: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Return the embeddings of the prefill, and of all steps as they go on from the claims."""
    prefill = torch.empty(shape.nonces, first, hidden, dtype=dtype, device=bases.device)
    fill_inputs(prefill, bases[:, None])
    rows = torch.empty(shape.nonces, shape.seq_len - first, hidden, dtype=dtype, device=bases.device)
    for step in range(rows.shape[1]):
        decode.fill_step_inputs(rows[:, step], bases, claims[:, step], step=step + 1)
    return torch.cat((prefill, rows), dim=1)


def _tokens(request: DecodeRequest, bases: Tensor, claims: Tensor, vocabulary: int) -> Tensor:
    """Return the token ids of the prefill and of all steps, for layers that choose experts by them."""
    seeds = torch.tensor([token_seed(*_names(request), nonce) for nonce in request["nonces"]], device=bases.device)
    columns = [token_ids(seeds, request["seq_len"], vocabulary)]
    for step in range(1, request["max_tokens"] + 1):
        ids = decode.step_token_ids(bases, claims[:, step - 1], step=step, vocabulary=vocabulary)
        columns.append(ids.unsqueeze(1))
    return torch.cat(columns, dim=1)
