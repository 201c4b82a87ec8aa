# SPDX-License-Identifier: Apache-2.0
"""Pods that lie to a gateway, which is a process of its own, as fast as they can, while another one is honest."""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
from yarl import URL

from poc_operator.apis.v1alpha1.conditions import Condition
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.gateway import GatewayClient
from poc_operator.observed import CollectedRound, GatewayReport
from poc_operator.rounds.plan import plan
from poc_operator.rounds.snapshot import RoundSnapshot
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.deliveries import JSON, ROUND, artifacts, encoded, path, round_body, vector
from tests.support.builders.secrets import ENVIRONMENT, OPERATOR_TOKEN, a_grant, pod_headers
from tests.support.fakes.attacker import attacking, post
from tests.support.fakes.receiver import Receiver, receiving

log = logging.getLogger(__name__)

SECONDS = 6.0
BATCH = 32
#: Slots: of an honest pod, and of one that was given to a liar after an honest pod had begun it.
HONEST, MOVED = 0, 1
BEGUN = 200
#: Nonces of which the liar sends other results: what was not forwarded before waits for a decision.
DISPUTED = (MOVED, MOVED + 2)
FAR = 2147483645
#: As an operator with other keys, or a pod of another round, might send.
FOREIGN = pod_headers(key="another key")
SETTINGS = {**ENVIRONMENT, "POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8", "POC_GATEWAY_PEER_REQUESTS": "1000"}


def lies(url: URL) -> list[bytes]:
    """What the liar sends, who has a credential of slot 1."""
    liar = pod_headers(a_grant(slot=MOVED, pod="liar", rate=50))
    rival = artifacts(range(MOVED, 2 * BEGUN, 2))
    for nonce in DISPUTED:
        rival = rival.replace(encoded(nonce).encode(), encoded(nonce + 7_000).encode())
    verdict = json.dumps(ROUND | {"request_id": "r", "x": "x" * 2**21}).encode()
    small = [json.dumps(ROUND | {"request_id": str(number), "x": "x" * 5_000}).encode() for number in range(3_000)]
    generated, validated = path(), path(end="validated")
    other_slot = post(url, generated, liar, artifacts(range(100_000, 100_100, 2)))
    far_ahead = post(url, generated, liar, artifacts([FAR]))
    forged = post(url, generated, FOREIGN, artifacts(range(100_000, 100_100, 2)))
    often = [other_slot, far_ahead, forged, post(url, generated, {}, artifacts([0])), post(url, generated, liar, rival)]
    verdicts = [post(url, validated, liar, body) for body in (verdict, *small)]
    return [request for one in verdicts for request in (*often, one)]


class HonestPod:
    """Delivers a slot in order and measures how long each answer takes."""

    def __init__(self, url: URL, slot: int, pod: str) -> None:
        self._url = url
        self._slot = slot
        self._headers = JSON | pod_headers(a_grant(slot=slot, pod=pod, rate=50_000))
        self.delivered = 0
        self.seconds: list[float] = []

    async def deliver(self, until: float, most: int = 2**31) -> None:
        """Deliver until the moment of the monotonic clock, or until so many are delivered."""
        async with aiohttp.ClientSession(self._url, headers=self._headers) as session:
            while monotonic() < until and self.delivered < most:
                nonces = [self._slot + 2 * index for index in range(self.delivered, self.delivered + BATCH)]
                begin = monotonic()
                async with session.post(path(), data=artifacts(nonces)) as answer:
                    assert (answer.status, (await answer.json())["stored"]) == (200, BATCH)
                self.seconds.append(monotonic() - begin)
                self.delivered += BATCH


@contextmanager
def running(database_url: str, folder: Path) -> Iterator[tuple[GatewayProcess, Receiver, dict[str, Any]]]:
    with receiving() as receiver:
        body = round_body(groups=2, callbackURL=receiver.url)
        (folder / "rounds.json").write_text(json.dumps([body]))
        with gateway(database_url, folder / "rounds.json", folder / "log", SETTINGS) as process:
            yield process, receiver, body


async def progress(url: str) -> CollectedRound:
    async with GatewayClient(url, OPERATOR_TOKEN) as client:
        found = await client.progress("ns", "round-uid-1", "uid-1")
    assert found is not None
    return found


def degraded(body: dict[str, Any], collected: CollectedRound) -> str:
    """What the operator tells of the round that the gateway answers about."""
    now = datetime.now(UTC).replace(microsecond=0)
    slots = [{"node": 0, "group": group, "state": "Running", "pod": "x", "uid": "x"} for group in (0, 1)]
    round_ = PoCRound.parse(body | {"status": {"slots": 2, "groups": 2, "assignments": slots}})
    report = GatewayReport(callback="http://gateway/", collected=collected, asked=now)
    seen = RoundSnapshot(work=round_, pods=[], reports={}, now=now, find_other_rounds=tuple, gateway=report)
    status = plan(seen).status
    assert status.outcome is None
    return next(one.message for one in status.conditions if isinstance(one, Condition) and one.type == "Degraded")


@pytest.mark.timeout(180)
async def test_no_lie_is_stored_or_forwarded_and_an_honest_pod_gets_on(tmp_path: Path) -> None:
    with running(f"sqlite:///{tmp_path}/gateway.db", tmp_path) as (process, receiver, body):
        url = URL(process.url)
        before, honest = HonestPod(url, MOVED, "before"), HonestPod(url, HONEST, "honest")
        await before.deliver(monotonic() + 60, BEGUN)
        with attacking(url, lies(url)) as attack:
            await honest.deliver(monotonic() + SECONDS)
        stored = honest.delivered + before.delivered
        forwarded = await asyncio.to_thread(receiver.wait_for, 1, 30)
        deadline, collected = monotonic() + 60, await progress(process.url)
        while (collected.forwarded < stored - len(DISPUTED) or not collected.refused) and monotonic() < deadline:
            await asyncio.sleep(0.2)
            collected = await progress(process.url)
    log.info("%.0f posts/s sent, answered %s", attack.sent / attack.seconds, dict(attack.answers))
    log.info("honest: %d in %.0f s, slowest answer %.3f s", honest.delivered, SECONDS, max(honest.seconds))
    assert forwarded
    _check_forwarded(receiver, before, honest)
    _check_totals(collected, before, honest)
    assert set(attack.answers) <= {200, 401, 403, 409, 413, 425, 429, 503}
    assert {200, 401, 403, 425} <= set(attack.answers)
    assert max(honest.seconds) < 5.0
    assert len(receiver.verdicts) <= 1_000
    message = degraded(body, collected)
    assert "pod before, then pod liar" in message
    assert "pod liar (" in message


def _check_forwarded(receiver: Receiver, before: HonestPod, honest: HonestPod) -> None:
    sent = {item["nonce"]: item["vector_b64"] for one in receiver.bodies for item in one["artifacts"]}
    expected = {2 * index for index in range(honest.delivered)} | {1 + 2 * index for index in range(before.delivered)}
    assert set(sent) | set(DISPUTED) == expected
    forged = [nonce for nonce, text in sent.items() if text != b64encode(vector(nonce)).decode()]
    assert forged == []


def _check_totals(collected: CollectedRound, before: HonestPod, honest: HonestPod) -> None:
    first, second = collected.slots
    assert (first.stored, first.delivered_index, first.conflicts) == (honest.delivered, honest.delivered, 0)
    assert (second.stored, second.delivered_index) == (before.delivered, before.delivered)
    (rivals,) = second.rivals
    assert (rivals.kept, rivals.other, rivals.nonce) == ("before", "liar", MOVED)
    (refused,) = collected.refused
    assert (refused.pod, refused.slot) == ("liar", MOVED)
