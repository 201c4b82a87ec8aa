# SPDX-License-Identifier: Apache-2.0
"""The status of the largest fleet fits into the API server: else nothing is evicted or rolled back."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.fleet import MAX_REPLICAS, FleetStatus
from poc_operator.apis.v1alpha1.fleet_update import MAX_FAILED, MAX_ROUNDS, FailedUpdate, FleetRound, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import (
    MAX_CHECK_NUMBERS,
    CheckResult,
    Fingerprint,
    FleetPod,
    Restart,
    SelfCheckReference,
    Stage,
)
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.clients.kube.objects import merge_patch
from tests.support.builders.largest_status import LONGEST, NOW
from tests.unit.poc_operator.apis.test_status import ETCD_BYTES, REST_BYTES

UID = "12345678-1234-1234-1234-123456789012"
#: A name of a pod, of a revision or of a Kubernetes node, and what a reference to a model is called.
NAME, NODE, MODEL = "n" * 63, "n" * 253, f"{'m' * 512} seqLen=65536 kDim=8192 nonces=1000"
FINGERPRINT = Fingerprint(**dict.fromkeys(Fingerprint.model_fields, LONGEST))
#: References while one model replaces another.
REFERENCES = 2
#: Restarts that `healing.restartsPerHour` may allow.
RESTARTS = 60


def a_pod(number: int) -> FleetPod:
    return FleetPod(
        name=f"{number:0{len(NAME)}d}",
        uid=UID,
        server=f"containerd://{'0' * 64}#99",
        reference=MODEL,
        judged_by="0123456789abcdef",
        revision=NAME,
        stage=Stage.NOT_READY,
        node=NODE,
        memory_errors=10**9,
        memory_errors_before=10**9,
        xid_errors=10**9,
        last_xid=999,
        result=CheckResult.PENDING,
        p_value="1.23456e-300",
        message=LONGEST,
        checked_time=NOW,
        fingerprint=FINGERPRINT,
    )


def a_reference(number: int) -> SelfCheckReference:
    vectors = base64.b64encode(bytes(2 * MAX_CHECK_NUMBERS)).decode()
    return SelfCheckReference(name=f"{number}{MODEL}", vectors=vectors, pod=NAME, time=NOW, fingerprint=FINGERPRINT)


def largest_status() -> FleetStatus:
    """Return a status of `MAX_REPLICAS` pods, with every field as large as an operator makes it."""
    reason = Reason.LEADER_WORKER_SET_UNKNOWN
    return FleetStatus(
        message=LONGEST,
        model=MODEL,
        pods=[a_pod(number) for number in range(MAX_REPLICAS)],
        self_check_references=[a_reference(number) for number in range(REFERENCES)],
        restarts=[Restart(name=NAME, uid=f"{n}{UID}", time=NOW, message=LONGEST) for n in range(RESTARTS)],
        update=UpdateStatus(
            message=LONGEST,
            failed=[
                FailedUpdate(digest=f"{n}{NAME}", revision=NAME, message=LONGEST, time=NOW) for n in range(MAX_FAILED)
            ],
            rounds=[
                FleetRound(uid=f"{n}{UID}", name=NODE, start_time=NOW, over_time=NOW, height=10**9)
                for n in range(MAX_ROUNDS)
            ],
        ),
        conditions=[
            Condition(type=kind, status="False", reason=reason, message=LONGEST, last_transition_time=NOW)
            for kind in ConditionType
        ],
    )


def managed(value: object) -> Mapping[str, Any]:
    """Return what the API server notes of a value in the fields' managers. Items of lists are told apart by a key."""
    if isinstance(value, Mapping):
        return {f"f:{key}": managed(field) for key, field in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {_key(item): {".": {}, **managed(item)} for item in value}
    return {}


def _key(item: Mapping[str, Any]) -> str:
    key = next(name for name in ("name", "uid", "digest", "type") if name in item)
    return f"k:{_text({key: item[key]})}"


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def test_the_status_of_the_largest_fleet_fits_into_the_api_server() -> None:
    status = largest_status()
    patch = {"metadata": {"resourceVersion": "1" * 20}, "status": merge_patch(status)}
    size = len(_text(patch)) + len(_text(managed(status.stored())))
    assert size < ETCD_BYTES - REST_BYTES, size


def test_what_is_cut_of_a_fingerprint_makes_no_difference() -> None:
    """A pod is compared with a reference that was stored."""
    assert FINGERPRINT.flags.endswith("…")
    assert Fingerprint.model_validate(FINGERPRINT.model_dump(mode="json", by_alias=True)) == FINGERPRINT
