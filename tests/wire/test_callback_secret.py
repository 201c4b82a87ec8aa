# SPDX-License-Identifier: Apache-2.0
"""A receiver that asks for a user: the operator reads its Secret, and pods deliver with it."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from prometheus_client import generate_latest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import State
from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import StoreForbidden
from poc_operator.clients.kube import callback_secret
from poc_operator.clients.pods.client import PodClient
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import RoundFleet

HOST = "127.0.0.1"
OLD, NEW = BasicAuth("pod", "old-pa%ss@w/rd"), BasicAuth("pod", "new-pa%ss@w/rd")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    for name in ("REFRESH_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(callback_secret, name, 0.05)


@pytest.fixture
async def fleet(receiver: CallbackReceiver) -> AsyncIterator[RoundFleet]:
    """One pod, and a round that ends when it is told to."""
    async with AsyncExitStack() as stack, PodClient() as client:
        fleet = RoundFleet(stack, receiver, client, stop=None, callbackSecretRef={"name": "collector"})
        await fleet.start_pod(HOST)
        yield fleet


def delivers(status: RoundStatus) -> bool:
    return status.totals.delivered > 20


async def finish(fleet: RoundFleet) -> None:
    """End the round, and check that every nonce arrived once."""
    fleet.change(finish=True)
    status = await fleet.reconcile_until(lambda status: status.state is State.COMPLETE)
    assert sorted(fleet.receiver.nonces) == list(range(status.totals.checked))
    assert (status.totals.rejected, status.totals.retries) == (0, 0)


async def test_pods_deliver_with_what_the_secret_has(
    fleet: RoundFleet, receiver: CallbackReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    receiver.password, fleet.store.secret = OLD.password, OLD
    await fleet.reconcile_until(delivers)
    await finish(fleet)
    assert receiver.authorizations == {OLD.header}
    work = fleet.store.work
    assert work is not None
    seen = [caplog.text, work.model_dump_json(by_alias=True), repr(fleet.events), generate_latest().decode()]
    for secret in (OLD.password, json.dumps(OLD.password), b64encode(OLD.password.encode()).decode(), OLD.header):
        assert not [text for text in seen if secret in text]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LookupError(), "does not exist in namespace"),
        (StoreForbidden("HTTP 403"), "install the chart with rbac.readSecrets=true"),
        (ValueError('has no key "password", or an empty one: set it'), 'has no key "password"'),
    ],
)
async def test_a_round_waits_for_its_secret(
    fleet: RoundFleet, receiver: CallbackReceiver, fault: Exception, message: str
) -> None:
    receiver.password, fleet.store.secret = OLD.password, fault
    await fleet.reconcile_until(lambda status: message in status.message)
    assert receiver.attempts == 0
    fleet.store.secret = OLD
    await fleet.reconcile_until(delivers)
    await finish(fleet)


async def test_a_password_changes_while_the_round_runs(fleet: RoundFleet, receiver: CallbackReceiver) -> None:
    fleet.store.secret = OLD
    await fleet.reconcile_until(delivers)
    fleet.store.secret = NEW
    # The receiver takes both until the pods have the new one.
    await fleet.reconcile_until(lambda _: NEW.header in receiver.authorizations)
    receiver.password = NEW.password
    before = fleet.store.work.status.totals.delivered if fleet.store.work is not None else 0
    await fleet.reconcile_until(lambda status: status.totals.delivered > before + 20)
    await finish(fleet)


async def test_a_secret_that_goes_away_holds_up_no_pod_that_computes(
    fleet: RoundFleet, receiver: CallbackReceiver
) -> None:
    receiver.password, fleet.store.secret = OLD.password, OLD
    await fleet.reconcile_until(delivers)
    fleet.store.secret = LookupError()
    status = await fleet.reconcile_until(lambda status: status.degraded == "CallbackSecretUnavailable")
    await fleet.reconcile_until(lambda now: now.totals.delivered > status.totals.delivered + 20)
    await finish(fleet)


async def test_a_replaced_operator_tells_the_pods_what_changed_meanwhile(
    fleet: RoundFleet, receiver: CallbackReceiver
) -> None:
    fleet.store.secret = OLD
    await fleet.reconcile_until(delivers)
    fleet.store.secret, fleet.operator = NEW, fleet.new_operator()
    await fleet.reconcile_until(lambda _: NEW.header in receiver.authorizations)
    receiver.password = NEW.password
    await finish(fleet)
