# SPDX-License-Identifier: Apache-2.0
"""Seeds take the place of what routers say, on each of them, or the forward pass fails."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

from torch import Tensor, nn  # noqa: E402

from vllm_poc.maths.decode import route_logits  # noqa: E402
from vllm_poc.worker.passes.plain import SeededRouters, find_routers  # noqa: E402

EXPERTS, TOP_K, HIDDEN = 5, 2, 3
TOKENS = 2


class Gate(nn.Linear):  # type: ignore[misc]
    """Returns logits and nothing else, as vLLM's linear layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


def a_layer(gate: nn.Module | None) -> nn.Module:
    layer = nn.Module()
    layer.mlp = nn.Module()
    if gate is not None:
        layer.mlp.gate, layer.mlp.experts = gate, nn.Module()
    return layer


def logits_of(*starts: int) -> Tensor:
    """Of one router, for nonces whose first experts these are."""
    return route_logits(torch.tensor([starts]), experts=EXPERTS, top_k=TOP_K, dtype=torch.float32)


def routers_of(gate: nn.Module) -> SeededRouters:
    return SeededRouters(find_routers([a_layer(gate)]), EXPERTS, TOP_K)


def test_routers_are_counted_without_dense_layers() -> None:
    gates = [Gate(HIDDEN, EXPERTS), nn.Linear(HIDDEN, EXPERTS)]
    found = find_routers([a_layer(None), a_layer(gates[0]), a_layer(None), a_layer(gates[1])])
    assert [router is gate for router, gate in zip(found, gates, strict=True)] == [True, True]


def test_routers_that_choose_by_token_id_take_no_number() -> None:
    by_token, gate = Gate(HIDDEN, EXPERTS), Gate(HIDDEN, EXPERTS)
    by_token.tid2eid, gate.tid2eid = torch.zeros(7, TOP_K), None
    assert find_routers([a_layer(by_token), a_layer(gate)]) == [gate]


@pytest.mark.parametrize("kind", [Gate, nn.Linear])
def test_all_tokens_of_a_nonce_get_its_experts_in_any_form_of_answer(kind: type[nn.Linear]) -> None:
    gate = kind(HIDDEN, EXPERTS)
    rows = torch.randn(2 * TOKENS, HIDDEN)
    routers = routers_of(gate)
    first, second = [101, -1e4, -1e4, -1e4, 102], [-1e4, 102, 101, -1e4, -1e4]
    for starts, expected in [((4, 1), [first, second]), ((1, 4), [second, first])]:
        with routers.choosing(logits_of(*starts), TOKENS):
            seeded = gate(rows)
        logits = seeded[0] if isinstance(seeded, tuple) else seeded
        assert logits.tolist() == [row for row in expected for _ in range(TOKENS)]
    own = gate(rows)
    assert isinstance(own, tuple) == isinstance(seeded, tuple)
    assert not torch.equal(own[0] if isinstance(own, tuple) else own, logits), "logits are still replaced"


def test_logits_have_the_type_of_the_routers_own() -> None:
    gate = nn.Linear(HIDDEN, EXPERTS, dtype=torch.bfloat16)
    with routers_of(gate).choosing(logits_of(0), TOKENS):
        assert gate(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("times", [0, 2])
def test_a_router_that_is_not_asked_once_fails_the_pass(times: int) -> None:
    gate = Gate(HIDDEN, EXPERTS)
    with (
        pytest.raises(RuntimeError, match=rf"routers were asked \[{times}\] times"),
        routers_of(gate).choosing(logits_of(0), TOKENS),
    ):
        _ = [gate(torch.zeros(TOKENS, HIDDEN)) for _ in range(times)]


def test_logits_of_other_tokens_fail_the_pass() -> None:
    gate = Gate(HIDDEN, EXPERTS)
    with (
        pytest.raises(RuntimeError, match="gave logits"),
        routers_of(gate).choosing(logits_of(0), TOKENS),
    ):
        gate(torch.zeros(1 + TOKENS, HIDDEN))
