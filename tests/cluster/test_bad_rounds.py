# SPDX-License-Identifier: Apache-2.0
"""The API server refuses a wrong round at once, naming the field and the remedy."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE
from hack.toolchain.common import UserError
from tests.cluster.rounds import SPEC, Rounds, manifest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

HASH = SPEC["blockHash"]
MODEL = SPEC["model"]
NODES = SPEC["nodes"]
HEX = "must be the block's hash: 64 hexadecimal digits, without 0x"
DECIMAL = 'must be a decimal above 0 and below 2 in quotes, for example "1.405"'
KEY = "must be the key's text (hexadecimal or base64), without spaces or line breaks"
URL = "must be an http:// or https:// URL with a host, a port up to 65535 if any, and without query or fragment"
ONE_PROTOCOL = "set exactly one of rTarget (distance protocol) and artifact (artifact protocol)"
ONE_STOP = "set exactly one of afterSeconds, afterNonces and afterValid"
ONE_SOURCE = "set exactly one of inline, configMap and round"
DISTANCE = {"nonce": 1, "distance": "1.3"}
VALIDATE: dict[str, Any] = {"mode": "Validate", "nodes": None, "proofs": {"inline": [DISTANCE]}}
SAMPLE: dict[str, Any] = {**VALIDATE, "proofs": {"round": {"name": "before"}}}
CALIBRATE: dict[str, Any] = {
    "mode": "Calibrate",
    "nodes": None,
    "rTarget": None,
    "calibrate": {"validRate": "0.1"},
}
IMMUTABLE = "immutable: delete the round and create a new one"

#: What is wrong: (changes of a valid spec, where None takes a field away; what the message says).
WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "both protocols": ({"artifact": {}}, ("spec: Invalid", ONE_PROTOCOL)),
    "no protocol": ({"rTarget": None}, ("spec: Invalid", ONE_PROTOCOL)),
    "short hash": ({"blockHash": HASH[:-1]}, ("spec.blockHash", HEX)),
    "hash with 0x": ({"blockHash": f"0x{HASH}"}, ("spec.blockHash", HEX)),
    "hash of other letters": ({"blockHash": "g" * 64}, ("spec.blockHash", HEX)),
    "very long hash": ({"blockHash": HASH * 2}, ("spec.blockHash", "66")),
    "no hash": ({"blockHash": None}, ("spec.blockHash: Required value",)),
    "negative height": ({"blockHeight": -1}, ("spec.blockHeight", "greater than or equal to 0")),
    "height as text": ({"blockHeight": "7"}, ("spec.blockHeight", "must be of type integer")),
    "no height": ({"blockHeight": None}, ("spec.blockHeight: Required value",)),
    "empty key": ({"publicKey": ""}, ("spec.publicKey", KEY)),
    "key with a space": ({"publicKey": "02 a1"}, ("spec.publicKey", KEY)),
    "no key": ({"publicKey": None}, ("spec.publicKey: Required value",)),
    "empty node range": ({"nodes": {"first": 2, "last": 1, "count": 3}}, ("spec.nodes", "first must not exceed last")),
    "range outside count": ({"nodes": {"first": 0, "last": 3, "count": 3}}, ("spec.nodes", "last must be below count")),
    "negative node": ({"nodes": {**NODES, "first": -1}}, ("spec.nodes.first", "greater than or equal to 0")),
    "no nodes at all": ({"nodes": {**NODES, "count": 0}}, ("spec.nodes.count", "greater than or equal to 1")),
    "no count": ({"nodes": {"first": 0, "last": 0}}, ("spec.nodes.count: Required value",)),
    "too many slots": (
        {"nodes": {"first": 0, "last": 19_999, "count": 20_000, "groups": 64}},
        ("spec.nodes", "exceeds 10000 slots: serve fewer node ids in one round, or fewer groups"),
    ),
    "too many node ids": ({"nodes": {"first": 0, "last": 10_000, "count": 10_001}}, ("spec.nodes", "exceeds 10000")),
    "no nodes": ({"nodes": None}, ("mode Generate needs nodes",)),
    "rTarget as a word": ({"rTarget": "low"}, ("spec.rTarget", DECIMAL)),
    "negative rTarget": ({"rTarget": "-1.4"}, ("spec.rTarget", DECIMAL)),
    "rTarget of 0": ({"rTarget": "0.0"}, ("spec.rTarget", DECIMAL)),
    "rTarget of 2": ({"rTarget": "2"}, ("spec.rTarget", DECIMAL)),
    "rTarget with an exponent": ({"rTarget": "14e-1"}, ("spec.rTarget", DECIMAL)),
    "rTarget without quotes": ({"rTarget": 1.4}, ("spec.rTarget", "must be of type string")),
    "kDim of 0": ({"rTarget": None, "artifact": {"kDim": 0}}, ("spec.artifact.kDim", "greater than or equal to 1")),
    "no model": ({"model": None}, ("spec.model: Required value",)),
    "empty model name": ({"model": {**MODEL, "name": ""}}, ("spec.model.name", "at least 1 chars long")),
    "no model name": ({"model": {"seqLen": 64}}, ("spec.model.name: Required value",)),
    "no seqLen": ({"model": {"name": "demo"}}, ("spec.model.seqLen: Required value",)),
    "seqLen of 0": ({"model": {**MODEL, "seqLen": 0}}, ("spec.model.seqLen", "greater than or equal to 1")),
    "strongRng for distances": (
        {"model": {**MODEL, "strongRng": True}},
        ("spec.model.strongRng", "needs the artifact protocol: remove it, or replace rTarget by artifact"),
    ),
    "no labels": ({"selector": {"matchLabels": {}}}, ("spec.selector.matchLabels", "at least 1 properties")),
    "a comma in a label's value": (
        {"selector": {"matchLabels": {"app": "a,b=c"}}},
        ("spec.selector.matchLabels.app", "must be a label's value"),
    ),
    "port of 0": ({"port": 0}, ("spec.port", "greater than or equal to 1")),
    "port too high": ({"port": 65536}, ("spec.port", "less than or equal to 65535")),
    "unknown mode": ({"mode": "Guess"}, ("spec.mode: Unsupported value", '"Generate", "Validate", "Calibrate"')),
    "nothing to validate": ({"mode": "Validate", "nodes": None}, ("mode Validate needs proofs",)),
    "proofs for another mode": ({"proofs": {"inline": [DISTANCE]}}, ("mode Validate needs proofs, the other modes",)),
    "nodes to validate": ({**VALIDATE, "nodes": NODES}, ("in the other modes the pods compute named nonces",)),
    "stop of a validation": ({**VALIDATE, "stop": {"afterNonces": 1}}, ("stop, callbackURL and crossCheck are",)),
    "no source of proofs": ({**VALIDATE, "proofs": {}}, ("spec.proofs", ONE_SOURCE)),
    "two sources of proofs": (
        {**VALIDATE, "proofs": {"inline": [DISTANCE], "configMap": {"name": "claims"}}},
        ("spec.proofs", ONE_SOURCE),
    ),
    "a source of proofs and a round": (
        {**VALIDATE, "proofs": {"inline": [DISTANCE], "round": {"name": "before"}}},
        ("spec.proofs", ONE_SOURCE),
    ),
    "a sample of nothing": (
        {**VALIDATE, "proofs": {"round": {"name": "before", "nonces": 0}}},
        ("spec.proofs.round.nonces", "greater than or equal to 1"),
    ),
    "finish of another mode": ({**VALIDATE, "finish": True}, ("finish is for mode Generate",)),
    "no proofs": ({**VALIDATE, "proofs": {"inline": []}}, ("spec.proofs.inline", "at least 1 items")),
    "too many proofs": (
        {**VALIDATE, "proofs": {"inline": [{**DISTANCE, "nonce": n} for n in range(201)]}},
        ("spec.proofs.inline", "must have at most 200 items"),
    ),
    "proofs of the other protocol": (
        {**VALIDATE, "proofs": {"inline": [{"nonce": 1, "vector": "AAAA"}]}},
        ("each proof needs vector in the artifact protocol, distance in the distance protocol",),
    ),
    "a proof of both protocols": (
        {**VALIDATE, "proofs": {"inline": [{**DISTANCE, "vector": "AAAA"}]}},
        ("spec.proofs.inline[0]", "set exactly one of vector and distance"),
    ),
    "a nonce proved twice": ({**VALIDATE, "proofs": {"inline": [DISTANCE, DISTANCE]}}, ("Duplicate value",)),
    "a proof beyond int32": (
        {**VALIDATE, "proofs": {"inline": [{**DISTANCE, "nonce": 2**31}]}},
        ("spec.proofs.inline[0].nonce", "less than or equal to 2147483647"),
    ),
    "a negative proof": (
        {**VALIDATE, "proofs": {"inline": [{**DISTANCE, "nonce": -1}]}},
        ("spec.proofs.inline[0].nonce", "greater than or equal to 0"),
    ),
    "a distance as a word": (
        {**VALIDATE, "proofs": {"inline": [{"nonce": 1, "distance": "low"}]}},
        ("spec.proofs.inline[0].distance", "must be a decimal in quotes"),
    ),
    "fraud test of another mode": ({"fraud": {}}, ("fraud is for mode Validate: remove it",)),
    "certain mismatch": ({**VALIDATE, "fraud": {"pMismatch": "1"}}, ("spec.fraud.pMismatch", "below 1 in quotes")),
    "a target to calibrate": ({**CALIBRATE, "rTarget": "1.4"}, ("mode Calibrate looks for rTarget",)),
    "nothing to calibrate": ({**CALIBRATE, "calibrate": None}, ("mode Calibrate needs calibrate",)),
    "no wanted rate": ({**CALIBRATE, "calibrate": {}}, ("spec.calibrate.validRate: Required value",)),
    "all nonces valid": ({**CALIBRATE, "calibrate": {"validRate": "1.0"}}, ("spec.calibrate.validRate", "below 1")),
    "too few to calibrate": (
        {**CALIBRATE, "calibrate": {"validRate": "0.1", "nonces": 199}},
        ("spec.calibrate.nonces", "greater than or equal to 200"),
    ),
    "comparisons without pause": ({"crossCheck": {"sampleEvery": 9}}, ("spec.crossCheck.sampleEvery", "equal to 10")),
    "a validation that replaces": ({**VALIDATE, "onBusy": "Replace"}, ("onBusy Replace is for mode Generate",)),
    "batchSize of 0": ({"batchSize": 0}, ("spec.batchSize", "greater than or equal to 1")),
    "URL of another scheme": ({"callbackURL": "ftp://collector/poc"}, ("spec.callbackURL", URL)),
    "URL with too high a port": ({"callbackURL": "http://collector:99999/x"}, ("spec.callbackURL", URL)),
    "URL with a wrong address": ({"callbackURL": "http://[zz]/"}, ("spec.callbackURL", URL)),
    "endless time to live": (
        {"ttlSecondsAfterFinished": 10**12},
        ("spec.ttlSecondsAfterFinished", "less than or equal to 2147483647"),
    ),
    "URL with a query": ({"callbackURL": "http://collector/poc?a=b"}, ("spec.callbackURL", URL)),
    "no stop rule": ({"stop": {}}, ("spec.stop", ONE_STOP)),
    "two stop rules": ({"stop": {"afterNonces": 1, "afterValid": 1}}, ("spec.stop", ONE_STOP)),
    "stop after nothing": ({"stop": {"afterNonces": 0}}, ("spec.stop.afterNonces", "greater than or equal to 1")),
    "valid artifacts": (
        {"rTarget": None, "artifact": {}, "stop": {"afterValid": 1}},
        ("stop.afterValid needs rTarget", "use stop.afterNonces"),
    ),
    "unknown re-issue policy": (
        {"reissue": {"policy": "Maybe"}},
        ("spec.reissue.policy: Unsupported value", '"Resume", "Restart", "Never"'),
    ),
    "negative re-issue limit": (
        {"reissue": {"limitPerPod": -1}},
        ("spec.reissue.limitPerPod", "greater than or equal to 0"),
    ),
    "deadline of 0": ({"activeDeadlineSeconds": 0}, ("spec.activeDeadlineSeconds", "greater than or equal to 1")),
    "negative ttl": ({"ttlSecondsAfterFinished": -1}, ("spec.ttlSecondsAfterFinished", "greater than or equal to 0")),
    "suspend as text": ({"suspend": "yes"}, ("spec.suspend", "must be of type boolean")),
    "unknown field": ({"blokHash": HASH}, ('unknown field "spec.blokHash"',)),
    "unknown field of a field": ({"model": {**MODEL, "seq_len": 64}}, ('unknown field "spec.model.seq_len"',)),
}

#: Field: (another valid value, how the message names the field).
FIXED: dict[str, tuple[Any, str]] = {
    "blockHash": ("ab" * 32, "spec.blockHash"),
    "blockHeight": (8, "spec.blockHeight"),
    "publicKey": ("03ff", "spec.publicKey"),
    "nodes": ({"last": 1, "count": 2}, "nodes is"),
    "rTarget": ("1.3", "rTarget is"),
    "model": ({"seqLen": 128}, "spec.model"),
    "selector": ({"matchLabels": {"app": "vllm"}}, "spec.selector"),
    "port": (8001, "spec.port"),
    "batchSize": (16, "spec.batchSize"),
    "callbackURL": ("http://other.example.org", "callbackURL is"),
    "stop": ({"afterNonces": 6}, "stop is"),
    "reissue": ({"policy": "Never"}, "spec.reissue"),
    "stall": ({"afterSeconds": 60}, "spec.stall"),
    "onBusy": ("Fail", "spec.onBusy"),
    "crossCheck": ({"nonces": 9}, "crossCheck is"),
}
#: Optional fields that must not be taken away either.
KEPT = {"callbackURL": "callbackURL is", "stop": "stop is", "crossCheck": "crossCheck is"}
CHANGEABLE: dict[str, Any] = {
    "suspend": False,
    "finish": True,
    "ttlSecondsAfterFinished": 60,
    "activeDeadlineSeconds": 60,
    "startDeadlineSeconds": 60,
    "pollFailureSeconds": 60,
}


@pytest.fixture(scope="module")
def suspended(kube: Kube) -> Iterator[str]:
    """A round that waits and has most optional fields set."""
    with Rounds(kube, NAMESPACE) as rounds:
        optional = {"callbackURL": "http://collector.example.org", "stop": {"afterNonces": 5}, "crossCheck": {}}
        rounds.apply("fixed", suspend=True, **optional)
        yield "fixed"


@pytest.fixture(scope="module")
def suspended_artifact(kube: Kube, suspended: str) -> str:
    Rounds(kube, NAMESPACE).apply("fixed-artifact", suspend=True, rTarget=None, artifact={"kDim": 12})
    return "fixed-artifact"


def dry_apply(kube: Kube, body: dict[str, Any]) -> None:
    kube.kubectl("--namespace", NAMESPACE, "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(body))


def dry_patch(kube: Kube, name: str, **spec: Any) -> None:  # noqa: ANN401
    patch = json.dumps({"spec": spec})
    kube.kubectl("--namespace", NAMESPACE, "patch", "pocround", name, "--type=merge", "--dry-run=server", "-p", patch)


@pytest.mark.parametrize(("changes", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_round_is_refused(kube: Kube, changes: dict[str, Any], says: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        dry_apply(kube, manifest("wrong", **changes))
    for words in says:
        assert words in str(refusal.value)


def test_a_round_without_spec_is_refused(kube: Kube) -> None:
    body = copy.deepcopy(manifest("wrong"))
    del body["spec"]
    with pytest.raises(UserError, match="spec: Required value"):
        dry_apply(kube, body)


def test_all_mistakes_are_told_at_once(kube: Kube) -> None:
    with pytest.raises(UserError) as refusal:
        dry_apply(kube, manifest("wrong", port=0, batchSize=0, blockHeight=-1))
    assert all(f"spec.{field}" in str(refusal.value) for field in ("port", "batchSize", "blockHeight"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rTarget": None, "artifact": {}},
        {"stop": {"afterValid": 1}},
        {"crossCheck": {}},
        VALIDATE,
        SAMPLE,
        CALIBRATE,
    ],
)
def test_a_right_round_is_accepted(kube: Kube, changes: dict[str, Any]) -> None:
    dry_apply(kube, manifest("right", **changes))


@pytest.mark.parametrize(("field", "value", "says"), [(f, v, s) for f, (v, s) in FIXED.items()], ids=FIXED)
def test_a_field_is_fixed(kube: Kube, suspended: str, field: str, value: object, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        dry_patch(kube, suspended, **{field: value})
    assert says in str(refusal.value)
    assert IMMUTABLE in str(refusal.value)


@pytest.mark.parametrize(("field", "says"), KEPT.items(), ids=KEPT)
def test_a_field_stays(kube: Kube, suspended: str, field: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        dry_patch(kube, suspended, **{field: None})
    assert f"{says} {IMMUTABLE}" in str(refusal.value)


@pytest.mark.parametrize("change", [{"artifact": {"kDim": 13}}, {"artifact": None, "rTarget": "1.4"}])
def test_the_protocol_is_fixed(kube: Kube, suspended_artifact: str, change: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refusal:
        dry_patch(kube, suspended_artifact, **change)
    assert f"artifact is {IMMUTABLE}" in str(refusal.value)


@pytest.mark.parametrize(("field", "value"), CHANGEABLE.items(), ids=CHANGEABLE)
def test_a_field_may_change(kube: Kube, suspended: str, field: str, value: object) -> None:
    dry_patch(kube, suspended, **{field: value})


def test_finish_cannot_be_taken_back(kube: Kube) -> None:
    with Rounds(kube, NAMESPACE) as rounds:
        rounds.apply("finished", suspend=True, finish=True)
        with pytest.raises(UserError, match="cannot be taken back: create a new round"):
            dry_patch(kube, "finished", finish=False)
