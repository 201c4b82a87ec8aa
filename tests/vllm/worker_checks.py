# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also tells what tests want to know of the worker."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata
from vllm.v1.worker.workspace import current_workspace_manager

from vllm_poc.rpc import BatchRequest, BatchResult, Failure
from vllm_poc.worker.extension import PocWorkerExtension


class CheckingExtension(PocWorkerExtension):
    """PoC's extension with a few methods more."""

    _poc_test_computed = 0
    _poc_test_preparing = False

    def poc_compute(self, request: BatchRequest) -> BatchResult | Failure | None:
        """Compute, and count it."""
        self._poc_test_computed += 1
        return super().poc_compute(request)

    def poc_test_computed(self) -> int:
        """Return how often this worker was asked to compute."""
        return self._poc_test_computed

    def poc_test_kv_checksum(self) -> str:
        """Return a checksum over the KV cache of all layers."""
        digest = hashlib.sha256()
        for cache in self.model_runner.kv_caches:
            digest.update(cache.contiguous().view(torch.uint8).cpu().numpy())
        return digest.hexdigest()

    def poc_test_held(self) -> dict[str, list[int]]:
        """Return a checksum and the address of each tensor that chat's attention holds, by name."""
        held = self._poc().stage.adapter.chat_memory.held()
        return {name: [part.address, hash(part.sums)] for name, part in held.items()}

    def poc_test_cache_sums(self) -> list[tuple[int, int]]:
        """Return two sums over the memory of chat's caches, in integers, one of them by place.

        Of models that keep states beside keys, whose layers share memory in ways of their own.
        """
        memories = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        sums = []
        for cache in memories.values():
            numbers = torch.empty(0, dtype=torch.int32, device=cache.device).set_(
                cache.untyped_storage(), 0, (cache.untyped_storage().nbytes() // 4,)
            )
            parts = [part.sum() for part in numbers.split(2**24)]
            by_place = sum((place + 1) * part for place, part in enumerate(parts))
            sums.append((int(sum(parts)), int(by_place)))
        return sums

    def poc_test_watch_builders(self) -> None:
        """Note from now on in which thread chat's metadata builders run, by whatever calls them."""
        self._poc_test_threads: list[int] = []
        self._poc_test_in_order: list[bool] = []
        for groups in self.model_runner.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                builder.build = partial(self._poc_test_built, type(builder).build, builder)

    def poc_test_builder_threads(self) -> list[int]:
        """Return the threads in which they ran since the last call."""
        found, self._poc_test_threads = self._poc_test_threads, []
        return found

    def poc_test_watch_input_preparation(self) -> bool:
        """Note from now on when vLLM lets inputs be prepared; False if this release has no such method."""
        own = getattr(self.model_runner, "synchronize_input_prep", None)
        if own is None:
            return False

        @contextmanager
        def watched() -> Iterator[None]:
            with own():
                self._poc_test_preparing = True
                yield
                self._poc_test_preparing = False

        self.model_runner.synchronize_input_prep = watched
        return True

    def poc_test_builders_in_order(self) -> list[bool]:
        """Return of each call of a builder since they are watched whether it was made then."""
        return self._poc_test_in_order

    def _poc_test_built(self, build: Callable[..., Any], builder: object, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        self._poc_test_threads.append(get_ident())
        self._poc_test_in_order.append(self._poc_test_preparing)
        return build(builder, *args, **options)

    def poc_test_order_saves(self) -> None:
        """Order each of chat's KV connectors to keep two blocks of each layer, as if a batch were not over yet."""
        orders = ExampleConnectorMetadata()
        size = self.model_runner.vllm_config.cache_config.block_size
        orders.add_request(list(range(2 * size + 1)), [1, 2], size, is_store=True, mm_hashes=[])
        for connector in _connectors():
            connector.bind_connector_metadata(orders)

    def poc_test_end_orders(self) -> bool:
        """Take the orders back, and return whether they were still there."""
        ordered = all(connector.has_connector_metadata() for connector in _connectors())
        for connector in _connectors():
            connector.clear_connector_metadata()
        return ordered

    def poc_test_expert_counts(self) -> list[int]:
        """Return how many tokens each place of an expert had, in all steps that its balancer looks back on."""
        (state,) = self.model_runner.eplb_state.model_states.values()
        counts: list[int] = (state.expert_load_pass + state.expert_load_window.sum(0)).flatten().tolist()
        return counts

    def poc_test_expert_places(self) -> list[list[int]]:
        """Return which expert is in each place, by layer."""
        (state,) = self.model_runner.eplb_state.model_states.values()
        places: list[list[int]] = state.physical_to_logical_map.tolist()
        return places

    def poc_test_workspace(self) -> tuple[bool, list[int]]:
        """Say whether vLLM's shared workspace is locked, and the addresses of its parts."""
        workspace = current_workspace_manager()
        parts = [part.data_ptr() for part in workspace._current_workspaces if part is not None]
        return workspace.is_locked(), parts


def _connectors() -> list[Any]:
    connector = get_kv_transfer_group()
    return getattr(connector, "_connectors", [connector])
