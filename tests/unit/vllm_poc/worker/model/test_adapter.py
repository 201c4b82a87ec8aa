# SPDX-License-Identifier: Apache-2.0
"""PoC's plan of a batch takes its turn with the inputs that vLLM prepares for chat."""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

import torch
from vllm.distributed import communication_op
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.gpu import model_runner as second_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_poc.worker.model import adapter as adapters
from vllm_poc.worker.model import ranks
from vllm_poc.worker.model.scratch import BatchShape, CacheGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 16


def a_runner(seen: list[str], *, dimensions: int = 0, model: torch.nn.Module | None = None, **more: Any) -> Any:  # noqa: ANN401 - stands in for vLLM's
    model = model or torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    kind = SimpleNamespace(hf_config=SimpleNamespace(model_type="any"), dtype=torch.float32, uses_mrope=dimensions > 0)
    if dimensions > 3:  # earlier releases do not tell, and have three
        kind.mrope_num_dims = dimensions
    config = SimpleNamespace(model_config=kind, parallel_config=SimpleNamespace(enable_eplb=False))
    more = {"attn_groups": [], **more}
    return SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"), vllm_config=config, **more)


def a_group(seen: list[str], name: str) -> CacheGroup:
    def build(**_: object) -> SimpleNamespace:
        seen.append(f"build {name}")
        return SimpleNamespace()

    layer: Any = SimpleNamespace(kv_cache=torch.zeros(64, BLOCK, 2))
    return CacheGroup({name: layer}, SimpleNamespace(build=build), block_dim=0, block_size=BLOCK, page_bytes=0)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "Ranks", SimpleNamespace)


def test_all_builders_of_a_plan_run_between_two_batches_of_chat() -> None:
    seen: list[str] = []

    @contextmanager
    def synchronize_input_prep() -> Iterator[None]:
        seen.append("chat's inputs are read")
        yield
        seen.append("chat may prepare the next ones")

    adapter = adapters.ModelAdapter(a_runner(seen, synchronize_input_prep=synchronize_input_prep))
    adapter.groups = [a_group(seen, "a"), a_group(seen, "b")]
    adapter.plan(BatchShape(2, 17))
    assert seen == ["chat's inputs are read", "build a", "build b", "chat may prepare the next ones"]


def test_a_runner_that_prepares_no_two_batches_in_the_same_memory_has_nothing_to_wait_for() -> None:
    seen: list[str] = []
    adapter = adapters.ModelAdapter(a_runner(seen))
    adapter.groups = [a_group(seen, "a")]
    assert set(adapter.plan(BatchShape(2, 17)).slot_mapping) == {"a"}
    assert seen == ["build a"]


@pytest.mark.parametrize("dimensions", [0, 3, 4])
def test_positions_of_text_are_the_same_in_each_dimension(dimensions: int) -> None:
    adapter = adapters.ModelAdapter(a_runner([], dimensions=dimensions))
    expected = torch.tensor([0, 1, 2, 0, 1, 2])
    assert torch.equal(
        adapter.plan(BatchShape(2, 3)).positions, expected.expand(dimensions, -1) if dimensions else expected
    )


@pytest.mark.parametrize("method", ["execute_model", "_dummy_run"])
def test_vllms_first_runner_builds_behind_the_wait_that_plans_take(method: str) -> None:
    """If a release waits in another way, plans must do that, too."""
    source = inspect.getsource(getattr(GPUModelRunner, method))
    assert "self.synchronize_input_prep()" in source
    assert source.index("self.synchronize_input_prep()") < source.index("self._build_attention_metadata(")


def test_vllms_second_runner_has_no_wait_that_plans_would_have_to_take() -> None:
    source = inspect.getsource(second_runner)
    assert "build_attn_metadata" in source or "prepare_attn" in source, "this reads the wrong module"
    assert "input_prep" not in source
    assert "prepare_inputs_event" not in source


def test_a_worker_does_one_call_after_the_other() -> None:
    """Chat's batches and PoC's calls come from one queue, and only finished outputs go to another thread."""
    source = inspect.getsource(WorkerProc.worker_busy_loop)
    assert "rpc_broadcast_mq.dequeue(" in source
    assert "Thread" not in source
    assert "submit(" not in source


@pytest.mark.parametrize("name", ranks._STAND_INS)
def test_what_a_dry_run_replaces_is_a_collective_of_vllms(name: str) -> None:
    """One with another name would be left as it is, and wait for the other ranks."""
    assert callable(getattr(GroupCoordinator, name))


def test_a_dry_run_leaves_no_collective_that_a_pass_may_call() -> None:
    source = inspect.getsource(communication_op)
    called = set(re.findall(r"get_tp_group\(\)\.(\w+)\(", source)) - {"broadcast_tensor_dict"}  # chat's inputs
    assert called
    assert called <= ranks._STAND_INS.keys()


def test_a_dry_run_runs_without_others_and_leaves_the_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        world_size, rank_in_group = 2, 1

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("nobody else is there")

    group: Any = Group()
    for name in ("get_world_group", "get_tp_group", "get_pp_group"):
        monkeypatch.setattr(ranks, name, lambda: group)
    x = torch.arange(6.0).view(2, 3)
    with ranks.Ranks().without_collectives():
        assert torch.equal(group.all_reduce(x), x)
        assert group.all_gather(x, 0).shape == (4, 3)
        assert torch.equal(group.reduce_scatter(x, 0), x[1:])
    assert vars(group) == {}
