# SPDX-License-Identifier: Apache-2.0
"""What `helm uninstall` suspends: the work of the installation that acts, and of no other."""

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from kubernetes.aio import client

from poc_operator.apis.v1alpha1.meta import FINALIZER, LabelSelector, Resource
from poc_operator.controller import leader_election as leases
from poc_operator.controller import uninstall
from poc_operator.controller.leader_election import LeaderElection, LeaseReader
from poc_operator.observed import PodView
from tests.support.fakes.lease_api import LeaseApi, lease_api
from tests.unit.poc_operator.build import a_pod


@dataclass
class Installations:
    """Two installations of the chart, each with one operator; and one round, held by the finalizer."""

    api: LeaseApi
    connection: client.ApiClient
    seconds: float = 0.0
    pods: dict[str, PodView] = field(default_factory=dict)
    round: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        metadata = {"uid": "u", "name": "r", "namespace": "ns", "finalizers": [FINALIZER]}
        self.round = {"metadata": metadata, "spec": {}, "status": {"state": "Running"}}
        for release in ("one", "two"):
            labels = {"app.kubernetes.io/name": "vllm-poc-operator", "app.kubernetes.io/instance": release}
            self.pods[release] = replace(a_pod(f"{release}-pod"), namespace="system", labels=labels)

    def clock(self) -> float:
        """Each look at the clock takes a second."""
        self.seconds += 1
        return self.seconds

    def operator(self, release: str) -> LeaderElection:
        return LeaderElection(self.connection, "kube-system", self.pods[release].name, self.clock)

    async def list_pods(self, namespace: str, selector: LabelSelector) -> list[PodView]:
        return [pod for pod in self.pods.values() if pod.namespace == namespace and selector.matches(pod.labels)]

    async def list_bodies(self, resource: type[Resource], _: Collection[str]) -> list[Mapping[str, Any]]:
        return [self.round] if resource.KIND.kind == "PoCRound" else []

    async def patch(self, _: type[Resource], body: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        assert body is self.round
        for part, fields in changes.items():
            self.round[part] |= fields

    async def uninstall(self, release: str) -> None:
        """Run what `helm uninstall` runs; no operator is there to do its part."""
        lease = LeaseReader(self.connection, "kube-system", self.clock)
        store: Any = self
        other = partial(uninstall.holder_of_another, lease, store, "system", release=release)
        await uninstall.suspend_all(store, (), 0.0, other_holder=other)

    @property
    def touched(self) -> bool:
        """Whether the round was suspended, or lost the finalizer."""
        return bool(self.round["spec"] == {"suspend": True} and self.round["metadata"]["finalizers"] == [])

    @property
    def untouched(self) -> bool:
        """Whether the round is as it was."""
        return bool(self.round["spec"] == {} and self.round["metadata"]["finalizers"] == [FINALIZER])


@pytest.fixture
async def both(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Installations]:
    monkeypatch.setattr(leases, "RETRY_SECONDS", 0.01)
    async with lease_api() as (api, connection):
        yield Installations(api, connection)


class Renewing:
    """Renews the Lease whenever somebody looks at the clock: an operator that runs beside."""

    def __init__(self, both: Installations, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._election = both.operator(release)
        read = LeaseReader._sign  # each read is followed by a renewal

        async def read_and_renew(reader: LeaseReader) -> tuple[str | None, object]:
            sign = await read(reader)
            await self._election.acquire()
            return sign

        monkeypatch.setattr(LeaseReader, "_sign", read_and_renew)


async def test_the_installation_that_acts_suspends_its_work(both: Installations) -> None:
    await both.operator("one").acquire()
    await both.uninstall("one")
    assert both.touched


async def test_one_that_waits_leaves_the_work_of_the_acting_one_alone(
    both: Installations, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await both.operator("one").acquire()
    Renewing(both, "one", monkeypatch)
    with caplog.at_level(logging.INFO):
        await both.uninstall("two")
    assert both.untouched
    assert "nothing is suspended: one-pod, of another installation, holds the Lease" in caplog.text


async def test_pods_of_a_release_of_the_same_name_elsewhere_are_not_ours(
    both: Installations, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both.operator("one").acquire()
    Renewing(both, "one", monkeypatch)
    both.pods["one"] = replace(both.pods["one"], namespace="elsewhere")
    await both.uninstall("one")
    assert both.untouched


async def test_an_old_installation_leaves_alone_what_another_has_taken_over(
    both: Installations, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both.operator("one").acquire()
    assert both.api.lease is not None
    both.api.lease["spec"]["holderIdentity"] = both.pods["two"].name
    Renewing(both, "two", monkeypatch)
    await both.uninstall("one")
    assert both.untouched


async def test_a_holder_that_is_gone_keeps_nobody_from_it(both: Installations) -> None:
    await both.operator("one").acquire()
    await both.uninstall("two")
    assert both.touched
    assert both.seconds > leases.DURATION_SECONDS


@pytest.mark.parametrize("released", [False, True], ids=["no Lease", "released"])
async def test_without_a_holder_the_work_is_suspended(both: Installations, released: bool) -> None:
    if released:
        election = both.operator("two")
        await election.acquire()
        await election.release()
    await both.uninstall("one")
    assert both.touched
