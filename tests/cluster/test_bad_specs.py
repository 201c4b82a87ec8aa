# SPDX-License-Identifier: Apache-2.0
"""The API server refuses a wrong object at once, naming the field and the remedy, and keeps what is fixed."""

from typing import Any

import pytest

from tests.support.servers.api_server import ApiServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

HASH = "5f" * 32
MODEL: dict[str, Any] = {"name": "demo", "seqLen": 64}
NODES = {"first": 0, "last": 0, "count": 1}
BLOCK: dict[str, Any] = {"blockHash": HASH, "blockHeight": 1234567, "publicKey": "02a1b2c3d4", "model": MODEL}
DISTANCE = {"nonce": 1, "distance": "1.3"}
ROUND, VALIDATION, CALIBRATION = "PoCRound", "PoCValidation", "PoCCalibration"
#: A valid spec of each kind.
RIGHT: dict[str, dict[str, Any]] = {
    ROUND: {**BLOCK, "nodes": NODES, "rTarget": "1.416"},
    VALIDATION: {**BLOCK, "rTarget": "1.416", "proofs": {"inline": [DISTANCE]}},
    CALIBRATION: {**BLOCK, "validRate": "0.1"},
}
HEX = "must be the block's hash: 64 hexadecimal digits, without 0x"
DECIMAL = 'must be a decimal above 0 and below 2 in quotes, for example "1.405"'
KEY = "must be the key's text (hexadecimal or base64), without spaces or line breaks"
URL = "without user name, password, query or fragment"
ONE_PROTOCOL = "set exactly one of rTarget (distance protocol), artifact (artifact protocol) and decode"
ONE_STOP = "set exactly one of afterSeconds, afterNonces and afterValid"
ONE_SOURCE = "set exactly one of inline, configMap and round"
IMMUTABLE = "cannot be changed: delete the object and create a new one"

#: What is wrong: (kind, changes of a valid spec, where None takes a field away; what the message says).
WRONG: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "both protocols": (ROUND, {"artifact": {}}, ("spec: Invalid", ONE_PROTOCOL)),
    "no protocol": (ROUND, {"rTarget": None}, ("spec: Invalid", ONE_PROTOCOL)),
    "short hash": (ROUND, {"blockHash": HASH[:-1]}, ("spec.blockHash", HEX)),
    "hash with 0x": (ROUND, {"blockHash": f"0x{HASH}"}, ("spec.blockHash", HEX)),
    "hash of other letters": (ROUND, {"blockHash": "g" * 64}, ("spec.blockHash", HEX)),
    "very long hash": (ROUND, {"blockHash": HASH * 2}, ("spec.blockHash", "66")),
    "no hash": (ROUND, {"blockHash": None}, ("spec.blockHash: Required value",)),
    "negative height": (ROUND, {"blockHeight": -1}, ("spec.blockHeight", "greater than or equal to 0")),
    "height as text": (ROUND, {"blockHeight": "7"}, ("spec.blockHeight", "must be of type integer")),
    "no height": (ROUND, {"blockHeight": None}, ("spec.blockHeight: Required value",)),
    "empty key": (ROUND, {"publicKey": ""}, ("spec.publicKey", KEY)),
    "key with a space": (ROUND, {"publicKey": "02 a1"}, ("spec.publicKey", KEY)),
    "no key": (ROUND, {"publicKey": None}, ("spec.publicKey: Required value",)),
    "Secret without its address": (
        ROUND,
        {"callbackSecretRef": {"name": "collector"}},
        ("spec.callbackSecretRef", "callbackSecretRef needs callbackURL: set it, or remove callbackSecretRef"),
    ),
    "empty node range": (
        ROUND,
        {"nodes": {"first": 2, "last": 1, "count": 3}},
        ("spec.nodes", "first must not exceed last"),
    ),
    "range outside count": (
        ROUND,
        {"nodes": {"first": 0, "last": 3, "count": 3}},
        ("spec.nodes", "last must be below count"),
    ),
    "negative node": (ROUND, {"nodes": {**NODES, "first": -1}}, ("spec.nodes.first", "greater than or equal to 0")),
    "no nodes at all": (ROUND, {"nodes": {**NODES, "count": 0}}, ("spec.nodes.count", "greater than or equal to 1")),
    "no count": (ROUND, {"nodes": {"first": 0, "last": 0}}, ("spec.nodes.count: Required value",)),
    "too many slots": (
        ROUND,
        {"nodes": {"first": 0, "last": 19_999, "count": 20_000, "groups": 64}},
        ("spec.nodes", "has too many slots"),
    ),
    "too many node ids": (
        ROUND,
        {"nodes": {"first": 0, "last": 3_000, "count": 3_001}},
        ("spec.nodes", "must not exceed 3000"),
    ),
    "rTarget as a word": (ROUND, {"rTarget": "low"}, ("spec.rTarget", DECIMAL)),
    "negative rTarget": (ROUND, {"rTarget": "-1.4"}, ("spec.rTarget", DECIMAL)),
    "rTarget of 0": (ROUND, {"rTarget": "0.0"}, ("spec.rTarget", DECIMAL)),
    "rTarget of 2": (ROUND, {"rTarget": "2"}, ("spec.rTarget", DECIMAL)),
    "rTarget with an exponent": (ROUND, {"rTarget": "14e-1"}, ("spec.rTarget", DECIMAL)),
    "rTarget without quotes": (ROUND, {"rTarget": 1.4}, ("spec.rTarget", "must be of type string")),
    "kDim of 0": (
        ROUND,
        {"rTarget": None, "artifact": {"kDim": 0}},
        ("spec.artifact.kDim", "greater than or equal to 1"),
    ),
    "no model": (ROUND, {"model": None}, ("spec.model: Required value",)),
    "empty model name": (ROUND, {"model": {**MODEL, "name": ""}}, ("spec.model.name", "at least 1 chars long")),
    "no model name": (ROUND, {"model": {"seqLen": 64}}, ("spec.model.name: Required value",)),
    "no seqLen": (ROUND, {"model": {"name": "demo"}}, ("spec.model.seqLen: Required value",)),
    "seqLen of 0": (ROUND, {"model": {**MODEL, "seqLen": 0}}, ("spec.model.seqLen", "greater than or equal to 1")),
    "strongRng for distances": (
        ROUND,
        {"model": {**MODEL, "strongRng": True}},
        ("spec.model.strongRng", "needs the artifact protocol: remove it, or replace rTarget by artifact"),
    ),
    "a comma in a label's value": (
        ROUND,
        {"selector": {"matchLabels": {"app": "a,b=c"}}},
        ("spec.selector.matchLabels[app]", "must be a label's value"),
    ),
    "port of 0": (ROUND, {"port": 0}, ("spec.port", "greater than or equal to 1")),
    "port too high": (ROUND, {"port": 65536}, ("spec.port", "less than or equal to 65535")),
    "no source of proofs": (VALIDATION, {"proofs": {}}, ("spec.proofs", ONE_SOURCE)),
    "two sources of proofs": (
        VALIDATION,
        {"proofs": {"inline": [DISTANCE], "configMap": {"name": "claims"}}},
        ("spec.proofs", ONE_SOURCE),
    ),
    "a source of proofs and a round": (
        VALIDATION,
        {"proofs": {"inline": [DISTANCE], "round": {"name": "before"}}},
        ("spec.proofs", ONE_SOURCE),
    ),
    "a sample of nothing": (
        VALIDATION,
        {"proofs": {"round": {"name": "before", "nonces": 0}}},
        ("spec.proofs.round.nonces", "greater than or equal to 1"),
    ),
    "no proofs": (VALIDATION, {"proofs": {"inline": []}}, ("spec.proofs.inline", "at least 1 items")),
    "too many proofs": (
        VALIDATION,
        {"proofs": {"inline": [{**DISTANCE, "nonce": n} for n in range(201)]}},
        ("spec.proofs.inline", "must have at most 200 items"),
    ),
    "proofs of the other protocol": (
        VALIDATION,
        {"proofs": {"inline": [{"nonce": 1, "vector": "AAAA"}]}},
        ("each proof needs vector in the artifact protocol, distance in the distance protocol",),
    ),
    "a proof of both protocols": (
        VALIDATION,
        {"proofs": {"inline": [{**DISTANCE, "vector": "AAAA"}]}},
        ("spec.proofs.inline[0]", "set exactly one of vector, distance and chain"),
    ),
    "a nonce proved twice": (VALIDATION, {"proofs": {"inline": [DISTANCE, DISTANCE]}}, ("Duplicate value",)),
    "a proof beyond int32": (
        VALIDATION,
        {"proofs": {"inline": [{**DISTANCE, "nonce": 2**31}]}},
        ("spec.proofs.inline[0].nonce", "less than or equal to 2147483647"),
    ),
    "a negative proof": (
        VALIDATION,
        {"proofs": {"inline": [{**DISTANCE, "nonce": -1}]}},
        ("spec.proofs.inline[0].nonce", "greater than or equal to 0"),
    ),
    "a distance as a word": (
        VALIDATION,
        {"proofs": {"inline": [{"nonce": 1, "distance": "low"}]}},
        ("spec.proofs.inline[0].distance", "must be a decimal in quotes"),
    ),
    "batchSize of 0": (ROUND, {"batchSize": 0}, ("spec.batchSize", "greater than or equal to 1")),
    "URL of another scheme": (ROUND, {"callbackURL": "ftp://collector/poc"}, ("spec.callbackURL", URL)),
    "URL with too high a port": (ROUND, {"callbackURL": "http://collector:99999/x"}, ("spec.callbackURL", URL)),
    "URL with a wrong address": (ROUND, {"callbackURL": "http://[zz]/"}, ("spec.callbackURL", URL)),
    "endless time to live": (
        ROUND,
        {"ttlSecondsAfterFinished": 10**12},
        ("spec.ttlSecondsAfterFinished", "less than or equal to 31536000"),
    ),
    "URL with a query": (ROUND, {"callbackURL": "http://collector/poc?a=b"}, ("spec.callbackURL", URL)),
    "no stop rule": (ROUND, {"stop": {}}, ("spec.stop", ONE_STOP)),
    "two stop rules": (ROUND, {"stop": {"afterNonces": 1, "afterValid": 1}}, ("spec.stop", ONE_STOP)),
    "stop after nothing": (
        ROUND,
        {"stop": {"afterNonces": 0}},
        ("spec.stop.afterNonces", "greater than or equal to 1"),
    ),
    "valid artifacts": (
        ROUND,
        {"rTarget": None, "artifact": {}, "stop": {"afterValid": 1}},
        ("stop.afterValid needs rTarget", "use stop.afterNonces"),
    ),
    "deadline of 0": (
        ROUND,
        {"activeDeadlineSeconds": 0},
        ("spec.activeDeadlineSeconds", "greater than or equal to 1"),
    ),
    "negative ttl": (
        ROUND,
        {"ttlSecondsAfterFinished": -1},
        ("spec.ttlSecondsAfterFinished", "greater than or equal to 0"),
    ),
    "suspend as text": (ROUND, {"suspend": "yes"}, ("spec.suspend", "must be of type boolean")),
    "unknown field": (ROUND, {"blokHash": HASH}, ('unknown field "spec.blokHash"',)),
    "unknown field of a field": (ROUND, {"model": {**MODEL, "seq_len": 64}}, ('unknown field "spec.model.seq_len"',)),
    "a node range of this cluster alone": (
        ROUND,
        {"nodes": {"first": 0, "last": 199, "count": 200, "groups": 64}},
        ("spec.nodes", "has too many slots"),
    ),
    "no nodes at all in a round": (ROUND, {"nodes": None}, ("spec.nodes: Required value",)),
    "an empty selector": (ROUND, {"selector": {}}, ("spec.selector", "would take every pod of the namespace")),
    "no labels": (ROUND, {"selector": {"matchLabels": {}}}, ("spec.selector", "set matchLabels or matchExpressions")),
    "a label's key with a space": (
        ROUND,
        {"selector": {"matchLabels": {"a b": "c"}}},
        ("spec.selector.matchLabels", "must be a label's key"),
    ),
    "In without values": (
        ROUND,
        {"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
        ("spec.selector.matchExpressions[0]", "In and NotIn need values"),
    ),
    "Exists with values": (
        ROUND,
        {"selector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
        ("spec.selector.matchExpressions[0]", "Exists and DoesNotExist must have none"),
    ),
    "an unknown operator": (
        ROUND,
        {"selector": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}},
        ("spec.selector.matchExpressions[0].operator", "Unsupported value"),
    ),
    "URL with a password": (ROUND, {"callbackURL": "http://user:secret@h/x"}, ("spec.callbackURL", URL)),
    "URL with two dots": (ROUND, {"callbackURL": "http://a..b/"}, ("spec.callbackURL", URL)),
    "URL with brackets around nothing": (
        ROUND,
        {"callbackURL": "http://[1::2::3]/"},
        ("spec.callbackURL", "valid IPv6 address"),
    ),
    "URL of another alphabet": (ROUND, {"callbackURL": "http://xn--a/"}, ("spec.callbackURL", "internationalised")),
    "comparisons without pause": (
        ROUND,
        {"crossCheck": {"intervalSeconds": 9}},
        ("spec.crossCheck.intervalSeconds", "equal to 10"),
    ),
    "unknown retry policy": (
        ROUND,
        {"retry": {"policy": "Maybe"}},
        ("spec.retry.policy: Unsupported value", '"Resume", "Restart", "Never"'),
    ),
    "negative limit of retries": (
        ROUND,
        {"retry": {"backoffLimitPerSlot": -1}},
        ("spec.retry.backoffLimitPerSlot", "greater than or equal to 0"),
    ),
    "a round with proofs": (ROUND, {"proofs": {"inline": [DISTANCE]}}, ('unknown field "spec.proofs"',)),
    "a mode": (ROUND, {"mode": "Validate"}, ('unknown field "spec.mode"',)),
    "a validation without proofs": (VALIDATION, {"proofs": None}, ("spec.proofs: Required value",)),
    "a validation with nodes": (VALIDATION, {"nodes": NODES}, ('unknown field "spec.nodes"',)),
    "a validation that replaces": (VALIDATION, {"concurrencyPolicy": "Replace"}, ('"Wait", "Fail"',)),
    "certain mismatch": (
        VALIDATION,
        {"statTest": {"pMismatch": "1"}},
        ("spec.statTest.pMismatch", "below 1 in quotes"),
    ),
    "a distance between distances": (
        VALIDATION,
        {"statTest": {"distThreshold": "0.4"}},
        ("statTest.distThreshold needs the artifact protocol",),
    ),
    "a calibration with a target": (CALIBRATION, {"rTarget": "1.4"}, ('unknown field "spec.rTarget"',)),
    "no wanted rate": (CALIBRATION, {"validRate": None}, ("spec.validRate: Required value",)),
    "all nonces valid": (CALIBRATION, {"validRate": "1.0"}, ("spec.validRate", "below 1")),
    "too few to calibrate": (CALIBRATION, {"nonces": 199}, ("spec.nonces", "greater than or equal to 200")),
}

#: Changes of fields that are fixed, by kind.
FIXED: list[tuple[str, str, Any]] = [
    *((kind, "blockHash", "ab" * 32) for kind in RIGHT),
    *((kind, "blockHeight", 8) for kind in RIGHT),
    *((kind, "publicKey", "03ff") for kind in RIGHT),
    *((kind, "model", {"seqLen": 128}) for kind in RIGHT),
    *((kind, "selector", {"matchLabels": {"app": "vllm"}}) for kind in RIGHT),
    *((kind, "port", 8001) for kind in RIGHT),
    *((kind, "batchSize", 16) for kind in RIGHT),
    *((kind, "concurrencyPolicy", "Fail") for kind in RIGHT),
    (ROUND, "nodes", {"last": 1, "count": 2}),
    (ROUND, "nodes", {"groups": 2}),
    (ROUND, "rTarget", "1.3"),
    (ROUND, "callbackURL", "http://other.example.org"),
    (ROUND, "callbackURL", None),
    (ROUND, "stop", {"afterNonces": 6}),
    (ROUND, "stop", None),
    (ROUND, "retry", {"policy": "Never"}),
    (ROUND, "stall", {"afterSeconds": 60}),
    (ROUND, "crossCheck", {"nonces": 9}),
    (ROUND, "crossCheck", None),
    (VALIDATION, "proofs", {"inline": [{"nonce": 2, "distance": "1.3"}]}),
    (VALIDATION, "statTest", {"pMismatch": "0.2"}),
    (VALIDATION, "retry", {"backoffLimitPerSample": 1}),
    (CALIBRATION, "validRate", "0.2"),
    (CALIBRATION, "nonces", 200),
    (CALIBRATION, "retry", {"backoffLimitPerSample": 1}),
]
CHANGEABLE: dict[str, Any] = {
    "suspend": True,
    "ttlSecondsAfterFinished": 60,
    "activeDeadlineSeconds": 60,
    "startDeadlineSeconds": 60,
    "pollFailureSeconds": 60,
}
OPTIONAL = {"callbackURL": "http://collector.example.org", "stop": {"afterNonces": 5}, "crossCheck": {}}


def create(api: ApiServer, kind: str, changes: dict[str, Any]) -> str:
    """Create an object as a trial; return what the API server says against it."""
    spec = {name: value for name, value in (RIGHT[kind] | changes).items() if value is not None}
    status, answer = api.create(kind, "trial", spec, dry_run=True)
    return "" if status == 201 else str(answer["message"])


@pytest.fixture(scope="module")
def existing(api: ApiServer) -> ApiServer:
    """The API server with an object of each kind that has most optional fields."""
    for kind, spec in RIGHT.items():
        status, answer = api.create(kind, "existing", spec | (OPTIONAL if kind == ROUND else {}))
        assert status == 201, answer
    return api


@pytest.mark.parametrize(("kind", "changes", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_object_is_refused(api: ApiServer, kind: str, changes: dict[str, Any], says: tuple[str, ...]) -> None:
    message = create(api, kind, changes)
    for words in says:
        assert words in message


@pytest.mark.parametrize("kind", RIGHT)
def test_an_object_without_spec_is_refused(api: ApiServer, kind: str) -> None:
    status, answer = api.create(kind, "trial", None, dry_run=True)
    assert (status, "spec: Required value" in answer["message"]) == (422, True)


def test_all_mistakes_are_told_at_once(api: ApiServer) -> None:
    message = create(api, ROUND, {"port": 0, "batchSize": 0, "blockHeight": -1})
    assert all(f"spec.{field}" in message for field in ("port", "batchSize", "blockHeight"))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in RIGHT),
        (ROUND, {"rTarget": None, "artifact": {}}),
        (ROUND, {"stop": {"afterValid": 1}}),
        (ROUND, {"crossCheck": {}}),
        (ROUND, {"nodes": {"first": 0, "last": 2_999, "count": 3_000}}),
        (VALIDATION, {"proofs": {"round": {"name": "before"}}}),
        (VALIDATION, {"proofs": {"configMap": {"name": "claims"}}}),
    ],
)
def test_a_right_object_is_accepted(api: ApiServer, kind: str, changes: dict[str, Any]) -> None:
    assert create(api, kind, changes) == ""


@pytest.mark.parametrize(("kind", "field", "value"), FIXED)
def test_a_field_is_fixed(existing: ApiServer, kind: str, field: str, value: object) -> None:
    status, answer = existing.patch(kind, "existing", {field: value})
    assert status == 422
    assert f"{field} {IMMUTABLE}" in answer["message"]


def test_the_protocol_is_fixed(existing: ApiServer) -> None:
    status, answer = existing.patch(ROUND, "existing", {"rTarget": None, "artifact": {}})
    assert (status, f"rTarget artifact {IMMUTABLE}" in answer["message"]) == (422, True)


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize(("field", "value"), CHANGEABLE.items(), ids=CHANGEABLE)
def test_a_field_may_change(existing: ApiServer, kind: str, field: str, value: object) -> None:
    for change in (value, None):
        assert existing.patch(kind, "existing", {field: change})[0] == 200


def test_finish_cannot_be_taken_back(api: ApiServer) -> None:
    assert api.create(ROUND, "finished", RIGHT[ROUND])[0] == 201
    assert api.patch(ROUND, "finished", {"finish": True})[0] == 200
    status, answer = api.patch(ROUND, "finished", {"finish": False})
    assert (status, "cannot be taken back: create a new round" in answer["message"]) == (422, True)


def test_only_rounds_can_be_finished(existing: ApiServer) -> None:
    for kind in (VALIDATION, CALIBRATION):
        status, answer = existing.patch(kind, "existing", {"finish": True})
        assert (status, 'unknown field "spec.finish"' in answer["message"]) == (422, True)
