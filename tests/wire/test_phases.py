# SPDX-License-Identifier: Apache-2.0
"""The distance protocol's phases, and proof batches."""

import asyncio
from typing import Any

import pytest

from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.engine import distance
from tests.support.servers.pod import ARTIFACT, DISTANCE, SLOT, Pod
from tests.wire.test_delivery import NEARLY_DONE, expected_nonces
from tests.wire.test_requests import error_of
from vllm_poc.wire.answers import PowState

VALID = [nonce for nonce in range(1000) if distance(nonce) < 1.405][:25]
INVALID = [nonce for nonce in range(1000) if distance(nonce) >= 1.405][:25]


def batch(nonces: list[int], dist: list[float] | None = None) -> dict[str, Any]:
    claimed = [distance(nonce) for nonce in nonces] if dist is None else dist
    sender = {"public_key": "prover", "block_hash": "other", "block_height": 1, "node_id": 9}
    return sender | {"nonces": nonces, "dist": claimed}


@pytest.fixture
async def validating(pod: Pod, receiver: CallbackReceiver) -> Pod:
    answer = await pod.post("init/validate", DISTANCE | {"callback_url": receiver.url})
    assert answer.json()["pow_status"]["status"] == "VALIDATING"
    return pod


async def test_an_honest_batch_passes(validating: Pod) -> None:
    body = (await validating.post("validate", batch(VALID))).json()
    assert body == {
        "status": "OK",
        "fraud_detected": False,
        "computed_distances": [distance(nonce) for nonce in VALID],
        "n_total": 25,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "not_computed": [],
    }
    status = await validating.status()
    assert (status.status, status.state, status.r_target) == (PowState.VALIDATING, PowState.VALIDATING, 1.405)


async def test_the_rounds_block_and_the_batchs_key_are_recomputed(validating: Pod) -> None:
    await validating.post("validate", batch(VALID))
    assert {(b["block_hash"], b["public_key"], b["seq_len"]) for b in validating.engine.batches} == {
        ("abc123", "prover", 64)
    }


@pytest.mark.parametrize(
    ("nonces", "dist", "mismatches", "fraud"),
    [
        (VALID[:20], None, 0, False),
        ([*VALID[:19], INVALID[0]], [1.39] * 20, 1, True),
        ([*VALID[:24], INVALID[0]], [1.39] * 25, 1, False),
        ([*VALID[:23], *INVALID[:2]], [1.39] * 25, 2, True),
        (VALID[:20], [1.39] * 19 + [1.405], 1, True),
        (INVALID, None, 25, True),
    ],
    ids=["honest", "one of 20", "one of 25", "two of 25", "claim at the target", "own invalid ones"],
)
async def test_what_is_not_below_the_target_counts_against_the_batch(
    validating: Pod, nonces: list[int], dist: list[float] | None, mismatches: int, fraud: bool
) -> None:
    body = (await validating.post("validate", batch(nonces, dist))).json()
    assert (body["n_total"], body["n_mismatch"]) == (len(nonces), mismatches)
    assert body["mismatch_nonces"] == (nonces[-mismatches:] if mismatches else [])
    assert body["fraud_detected"] is fraud


async def test_the_round_sets_the_test(pod: Pod) -> None:
    await pod.post("init/validate", DISTANCE | {"p_mismatch": 0.05, "fraud_threshold": 0.01})
    claimed = batch([*VALID[:23], *INVALID[:2]], [1.39] * 25)
    assert (await pod.post("validate", claimed)).json()["fraud_detected"] is False
    await pod.post("init/validate", DISTANCE | {"p_mismatch": 0.05, "fraud_threshold": 0.5})
    assert (await pod.post("validate", claimed)).json()["fraud_detected"] is True


async def test_the_verdict_goes_to_the_callback(validating: Pod, receiver: CallbackReceiver) -> None:
    validating.engine.sick.update({VALID[1]: 9})
    claimed = batch([*VALID[:3], INVALID[0]], [1.39] * 4)
    body = (await validating.post("validate", claimed)).json()
    assert body["computed_distances"] == [distance(VALID[0]), None, distance(VALID[2]), distance(INVALID[0])]
    await validating.reach(lambda s: s.callbacks_pending == 0)
    computed = [VALID[0], VALID[2], INVALID[0]]
    assert receiver.verdicts == [
        {
            "public_key": "prover",
            "block_hash": "abc123",
            "block_height": 7,
            "nonces": computed,
            "computed_distances": [distance(nonce) for nonce in computed],
            "received_distances": [1.39] * 3,
            "valid": [True, True, False],
            "fraud_detected": True,
            "n_total": 3,
            "n_mismatch": 1,
            "mismatch_nonces": [INVALID[0]],
            "p_value": body["p_value"],
            "not_computed": [VALID[1]],
        }
    ]


async def test_a_server_that_computes_nothing_gives_no_verdict(validating: Pod, receiver: CallbackReceiver) -> None:
    validating.engine.sick.update(dict.fromkeys(VALID, 9))
    error_of(await validating.post("validate", batch(VALID)), 503, "EngineFailed")
    assert receiver.attempts == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dist": [1.4]}, "dist has 1 entries for 2 nonces"),
        ({"dist": [1.4, "NaN"]}, "dist.1"),
        ({"dist": [1.4, None]}, "dist.1"),
        ({"nonces": [1, 1]}, "nonces must be unique"),
        ({"nonces": [1, -1]}, "nonces.1"),
        ({"nonces": [], "dist": []}, "nonces"),
        ({"public_key": ""}, "public_key"),
    ],
    ids=str,
)
async def test_bad_batches_are_refused(validating: Pod, change: dict[str, Any], message: str) -> None:
    error = error_of(await validating.post("validate", batch(VALID[:2]) | change), 422, "InvalidRequest")
    assert error.detail.startswith(message)
    assert validating.engine.computed == []


@pytest.mark.parametrize("route", ["phase/generate", "phase/validate", "validate"])
async def test_without_a_round_there_are_no_phases(pod: Pod, route: str) -> None:
    error = error_of(await pod.post(route, batch(VALID)), 400, "NotInitialized")
    assert error.detail.startswith("PoC not initialized")


@pytest.mark.parametrize("route", ["phase/generate", "phase/validate", "validate"])
async def test_an_artifact_round_has_no_phases(pod: Pod, route: str) -> None:
    await pod.start(ARTIFACT | SLOT)
    error_of(await pod.post(route, batch(VALID)), 409, "ProtocolMismatch")
    assert (await pod.status()).state is PowState.GENERATING


@pytest.mark.parametrize("route", ["init", "init/validate"])
async def test_init_is_of_the_distance_protocol(pod: Pod, route: str) -> None:
    error = error_of(await pod.post(route, ARTIFACT | SLOT), 422, "InvalidRequest")
    assert error.detail.startswith("init and init/validate are of the distance protocol and need r_target")


async def test_the_phases_of_a_round(pod: Pod, receiver: CallbackReceiver) -> None:
    body = DISTANCE | SLOT | {"callback_url": receiver.url, "round_id": "r1"}
    assert (await pod.post("init", body)).json()["pow_status"]["status"] == "IDLE"
    status = await pod.status()
    assert (status.state, status.round_id, status.r_target) == (PowState.IDLE, "r1", 1.405)
    for _ in range(3):
        assert (await pod.post("phase/generate")).json()["pow_status"]["status"] == "GENERATING"
        before = (await pod.status()).delivered_index
        await pod.reach(lambda s, before=before: s.delivered_index > before + 50)  # type: ignore[misc]
        assert (await pod.post("phase/validate")).json()["pow_status"]["status"] == "VALIDATING"
        assert (await pod.post("validate", batch(VALID))).status_code == 200
        assert (await pod.status()).state is PowState.VALIDATING
    assert (await pod.post("stop")).status_code == 200
    status = await pod.status()
    assert (status.status, status.state) == (PowState.IDLE, PowState.STOPPED)
    assert receiver.nonces == expected_nonces(body, status), "each phase goes on where the last one ended"


async def test_a_round_that_goes_on_keeps_the_end_that_it_was_given_last(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT | {"round_id": "a", "end_index": 16})
    assert (await pod.post("extend", {"round_id": "a", "end_index": 64})).status_code == 200
    await pod.reach(lambda s: s.next_index == 64)
    await pod.post("stop")
    assert (await pod.post("phase/generate")).status_code == 200
    status = await pod.status()
    assert (status.state, status.start_index, status.end_index) == (PowState.GENERATING, 64, 64)
    await pod.post("extend", {"round_id": "a", "end_index": 80})
    await pod.reach(lambda s: s.next_index == 80)
    assert len(pod.engine.computed) == 80


async def test_a_repeated_phase_changes_nothing(pod: Pod) -> None:
    await pod.post("init", DISTANCE | SLOT)
    for phase in ("phase/generate", "phase/generate", "phase/validate", "phase/validate"):
        assert (await pod.post(phase)).status_code == 200
    assert len(set(pod.engine.computed)) == len(pod.engine.computed)


async def test_generating_needs_a_slot(validating: Pod) -> None:
    error = error_of(await validating.post("phase/generate"), 400, "InvalidRequest")
    assert error.errors[0].field == "node_id"
    assert (await validating.status()).state is PowState.VALIDATING


async def test_a_slot_that_is_done_cannot_go_on(pod: Pod) -> None:
    await pod.start(DISTANCE | NEARLY_DONE)
    await pod.reach(lambda s: s.state is PowState.STOPPED)
    error_of(await pod.post("phase/generate"), 409, "SlotDone")


@pytest.mark.parametrize("route", ["init", "init/validate", "init/generate"])
async def test_another_round_does_not_replace_one_that_generates(pod: Pod, route: str) -> None:
    await pod.start(DISTANCE | SLOT | {"round_id": "r1"})
    error = error_of(await pod.post(route, DISTANCE | SLOT | {"round_id": "r2"}), 409, "RoundConflict")
    assert error.round_id == "r1"
    assert (await pod.status()).round_id == "r1"


async def test_proofs_are_judged_while_the_round_generates(pod: Pod) -> None:
    await pod.start(DISTANCE | SLOT)
    assert (await pod.post("validate", batch(VALID))).json()["n_total"] == 25
    before = (await pod.status()).next_index
    await pod.reach(lambda s: s.next_index > before)


@pytest.mark.parametrize("pod_settings", [{"QUEUED_NONCES": "40"}])
async def test_batches_beyond_the_queues_limit_are_refused(validating: Pod) -> None:
    validating.engine.seconds_per_batch = 1.0
    first = asyncio.create_task(validating.post("validate", batch(VALID)))
    await asyncio.sleep(0.05)
    error = error_of(await validating.post("validate", batch(VALID)), 429, "QueueFull")
    assert error.detail.startswith("Queue full: 50 nonces would be queued, and 40 may")
    validating.engine.seconds_per_batch = 0.0
    assert (await first).status_code == 200
    assert (await validating.post("validate", batch(VALID))).status_code == 200


async def test_a_stop_of_another_round_leaves_one_that_validates_alone(pod: Pod) -> None:
    await pod.post("init/validate", DISTANCE | {"round_id": "r1"})
    error = error_of(await pod.post("stop?round_id=r2"), 409, "RoundConflict")
    assert error.round_id == "r1"
    assert error.detail.startswith("Already validating: round r1 runs")
    assert (await pod.status()).state is PowState.VALIDATING
    assert (await pod.post("stop?round_id=r1")).status_code == 200
    assert (await pod.status()).state is PowState.STOPPED


async def test_a_start_replaces_a_round_that_validates(pod: Pod) -> None:
    await pod.post("init/validate", DISTANCE | {"round_id": "r1"})
    assert (await pod.start(DISTANCE | SLOT | {"round_id": "r2"})).status_code == 200
    assert (await pod.status()).round_id == "r2"
