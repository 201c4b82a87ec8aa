# SPDX-License-Identifier: Apache-2.0
"""Pods and operator learn of another token at moments of their own: no work is lost in between."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.pods.tokens import REFRESH_SECONDS, PodClients, Tokens
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.servers.fleet import RoundFleet
from vllm_poc.server import admission


class Secret:
    """A token as the operator reads it, and as pods do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._token = "first"  # noqa: S105
        self.seconds = 0.0
        file.write_text(self._token)

    async def read(self, namespace: str) -> str:
        return self._token

    def reaches_operator(self) -> None:
        self._token = "second"  # noqa: S105
        self.seconds += REFRESH_SECONDS

    def reaches_pods(self) -> None:
        self._file.write_text("second")


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secret:
    monkeypatch.setenv("VLLM_POC_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.0)
    return Secret(tmp_path / "token")


@pytest.fixture
async def fleet(
    secret: Secret, receiver: CallbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RoundFleet]:
    for name in ("CALLBACK_INTERVAL_SECONDS", "RETRY_FIRST_SECONDS"):
        monkeypatch.setenv(f"VLLM_POC_{name}", "0.01")
    tokens = Tokens(secret.read, lambda: secret.seconds)
    async with AsyncExitStack() as stack, PodClients(tokens) as clients:
        fleet = RoundFleet(stack, receiver, cast(Any, clients))
        for host in ("127.0.0.1", "127.0.0.2"):
            await fleet.start_pod(host)
        yield fleet


def computes(status: RoundStatus) -> bool:
    return all(slot.state == "Running" and slot.delivered > 0 for slot in status.assignments) and status.slots == 2


def is_refused(status: RoundStatus) -> bool:
    return all("send the token of VLLM_POC_TOKEN_FILE" in (slot.error or "") for slot in status.assignments)


def complete(status: RoundStatus) -> bool:
    return status.state is State.COMPLETE


@pytest.mark.parametrize("first", [Secret.reaches_operator, Secret.reaches_pods], ids=["operator", "pods"])
async def test_a_round_goes_on_with_another_token(fleet: RoundFleet, secret: Secret, first: Any) -> None:  # noqa: ANN401
    before = await fleet.reconcile_until(computes)
    first(secret)
    meanwhile = await fleet.reconcile_until(is_refused)
    assert [slot.state for slot in meanwhile.assignments] == ["Running", "Running"]
    secret.reaches_operator()
    secret.reaches_pods()
    status = await fleet.reconcile_until(complete)
    assert [slot.session for slot in status.assignments] == [slot.session for slot in before.assignments]
    assert status.totals.retries == 0
    assert set(Counter(fleet.receiver.nonces).values()) == {1}
    assert [event.reason for event in fleet.events] == ["Started", "Completed"]


async def test_a_round_waits_for_pods_that_have_yet_to_learn_the_token(fleet: RoundFleet, secret: Secret) -> None:
    secret.reaches_operator()
    waiting = await fleet.reconcile_until(lambda status: "send the token of" in status.message)
    assert not waiting.assignments
    secret.reaches_pods()
    status = await fleet.reconcile_until(complete)
    assert status.totals.retries == 0
