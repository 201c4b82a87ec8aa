# SPDX-License-Identifier: Apache-2.0
"""While PoC computes there are no adapters and no KV connector, and no tokens are counted; then all is as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

import torch
from torch import Tensor, nn
from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state
from vllm.lora.layers import BaseLayerWithLoRA

from vllm_poc.worker.model import base_model as module
from vllm_poc.worker.model.base_model import BaseModel, adapted_layers, require_known_connector
from vllm_poc.worker.model.scratch import UnsupportedModelError


class Doubling(BaseLayerWithLoRA):  # type: ignore[misc]  # vLLM is untyped here
    """A layer whose adapter adds what the base layer returns."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, values: Tensor) -> Tensor:
        """Return twice what the base layer returns."""
        return 2 * self.base_layer(values)


class Sharing(nn.Module):  # type: ignore[misc]
    """Two blocks of one layer, which the model has by two names, as some have their gate."""

    def __init__(self) -> None:
        super().__init__()
        shared = Doubling(nn.Identity())
        self.blocks = nn.ModuleList([nn.Sequential(shared, Doubling(nn.Identity())), nn.Sequential(nn.Identity())])
        self.alias = self.second = shared
        self.nothing = None

    def forward(self, values: Tensor) -> Tensor:
        """Return sixteen times the values with adapters, and the values without."""
        for block in self.blocks:
            values = block(values)
        return self.second(self.alias(values))


def base_model(model: nn.Module, balancer: object = None, *, balances: bool = False) -> BaseModel:
    parallel = SimpleNamespace(enable_eplb=balances or balancer is not None)
    config = SimpleNamespace(parallel_config=parallel)
    runner: Any = SimpleNamespace(get_model=lambda: model, vllm_config=config, eplb_state=balancer)
    return BaseModel(runner)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> object:
    connector = object()
    monkeypatch.setattr(kv_transfer_state, module._CONNECTOR, connector)
    return connector


def test_the_base_layers_stand_in_the_places_of_those_with_adapters() -> None:
    model, ones = Sharing(), torch.ones(1)
    names = dict(model.named_modules(remove_duplicate=False))
    assert len(adapted_layers(model)) == 4
    assert model(ones) == 16
    with base_model(model).alone():
        assert model(ones) == 1
    assert model(ones) == 16
    assert dict(model.named_modules(remove_duplicate=False)) == names


def test_a_model_without_adapters_has_no_such_layers() -> None:
    assert adapted_layers(nn.Sequential(nn.Linear(1, 1))) == []


def test_chats_connector_is_out_of_sight_and_back_again_also_after_an_error(connector: object) -> None:
    alone = base_model(model := Sharing()).alone()
    with pytest.raises(RuntimeError, match="no room"), alone:  # noqa: PT012 - it must fail inside
        assert not has_kv_transfer_group()
        raise RuntimeError("no room")
    assert kv_transfer_state.get_kv_transfer_group() is connector
    assert model(torch.ones(1)) == 16


@pytest.mark.usefixtures("connector")
def test_a_connector_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECTOR", "_ELSEWHERE")
    with pytest.raises(UnsupportedModelError, match="start vLLM without --kv-transfer-config"):
        require_known_connector()


@pytest.mark.parametrize("counted", [True, False])
def test_no_token_of_an_expert_is_counted_and_then_chats_are_as_before(counted: bool) -> None:
    balancer = SimpleNamespace(should_record_tensor=torch.tensor(counted))
    alone = base_model(nn.Sequential(), balancer).alone()
    with pytest.raises(RuntimeError, match="no room"), alone:  # noqa: PT012 - it must fail inside
        assert not balancer.should_record_tensor
        raise RuntimeError("no room")
    assert balancer.should_record_tensor == counted


@pytest.mark.parametrize("balancer", [None, SimpleNamespace(), SimpleNamespace(should_record_tensor=None)])
def test_a_release_that_always_counts_is_refused(balancer: object) -> None:
    with pytest.raises(UnsupportedModelError, match="start vLLM without --enable-eplb"):
        base_model(nn.Sequential(), balancer, balances=True)
