# SPDX-License-Identifier: Apache-2.0
"""What a spec says: which pods it selects, by which numbers it judges, and what its texts may be."""

from typing import Any

import pytest
from pydantic import ValidationError

from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import RoundSpec
from poc_operator.apis.v1alpha1.validation import Proof, StatTest, ValidationSpec
from vllm_poc.wire.messages import Protocol

COMMON: dict[str, Any] = {
    "blockHash": "ab" * 32,
    "blockHeight": 7,
    "publicKey": "key",
    "model": {"name": "demo", "seqLen": 64},
}


def a_round(**fields: Any) -> RoundSpec:  # noqa: ANN401
    nodes = {"first": 0, "last": 0, "count": 1}
    return RoundSpec.model_validate({**COMMON, "nodes": nodes, "rTarget": "1.4", **fields})


def a_validation(**fields: Any) -> ValidationSpec:  # noqa: ANN401
    return ValidationSpec.model_validate({**COMMON, "proofs": {"round": {"name": "r"}}, **fields})


@pytest.mark.parametrize(
    ("selector", "matching", "others"),
    [
        (
            {"matchLabels": {"a": "1", "b": "2"}},
            [{"a": "1", "b": "2", "c": "3"}],
            [{"a": "1"}, {"a": "2", "b": "2"}, {}],
        ),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, [{"a": "2"}], [{"a": "3"}, {}]),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, [{"a": "2"}, {}], [{"a": "1"}]),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, [{"a": ""}], [{"b": "1"}]),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, [{"b": "1"}], [{"a": ""}]),
        (
            {"matchLabels": {"b": "2"}, "matchExpressions": [{"key": "a", "operator": "Exists"}]},
            [{"a": "1", "b": "2"}],
            [{"a": "1"}, {"b": "2"}],
        ),
    ],
)
def test_a_selector_matches_as_in_kubernetes(
    selector: dict[str, Any], matching: list[dict[str, str]], others: list[dict[str, str]]
) -> None:
    found = LabelSelector.model_validate(selector)
    assert all(found.matches(labels) for labels in matching)
    assert not any(found.matches(labels) for labels in others)


def test_a_selector_as_the_api_server_takes_it() -> None:
    expressions = [
        {"key": "a", "operator": "In", "values": ["1", "2"]},
        {"key": "b", "operator": "NotIn", "values": ["3"]},
        {"key": "c", "operator": "Exists"},
        {"key": "d", "operator": "DoesNotExist"},
    ]
    selector = LabelSelector.model_validate({"matchLabels": {"x/y": "z"}, "matchExpressions": expressions})
    assert str(selector) == "x/y=z,a in (1,2),b notin (3),c,!d"


@pytest.mark.parametrize("value", ["1,2", "a b", "a)", "-a", "a" * 64])
def test_a_selector_has_no_value_that_a_list_would_read_otherwise(value: str) -> None:
    """With a comma in it, the API server would select other pods than the watch is filtered by."""
    with pytest.raises(ValidationError, match="matchLabels"):
        LabelSelector.model_validate({"matchLabels": {"a": value}})
    with pytest.raises(ValidationError, match="values"):
        LabelSelector.model_validate({"matchExpressions": [{"key": "a", "operator": "In", "values": [value]}]})


def test_the_test_is_the_networks_unless_the_spec_has_other_numbers() -> None:
    artifact = a_validation(artifact={}).thresholds
    assert (artifact.dist_threshold, artifact.p_mismatch, artifact.p_value_threshold) == (0.4, 0.1, 0.05)
    distance = a_validation(rTarget="1.4").thresholds
    assert (distance.p_mismatch, distance.p_value_threshold) == (5e-4, 0.01)
    own = a_validation(artifact={}, statTest={"distThreshold": "0.75", "pMismatch": "0.2"}).thresholds
    assert (own.dist_threshold, own.p_mismatch, own.p_value_threshold) == (0.75, 0.2, 0.05)


def test_a_statistical_test_goes_before_another_number_by_number() -> None:
    spec, preset = StatTest(dist_threshold="0"), StatTest(dist_threshold="0.75", p_mismatch="0.2")
    assert spec.or_else(preset) == StatTest(dist_threshold="0", p_mismatch="0.2")
    assert StatTest().or_else(preset) == preset
    assert preset.or_else(StatTest()) == preset


def test_a_threshold_of_zero_is_taken_as_told() -> None:
    assert a_validation(artifact={}, statTest={"distThreshold": "0"}).thresholds.dist_threshold == 0


def test_the_protocol_follows_from_the_spec() -> None:
    assert a_round().protocol is Protocol.DISTANCE
    assert a_round(rTarget=None, artifact={}).protocol is Protocol.ARTIFACT


@pytest.mark.parametrize(
    "url",
    [
        "http://collector.example.org/poc",
        "https://h",
        "http://h:8080",
        "http://10.0.0.1:65535/a/%20b",
        "http://[fd00::1]:80/x",
    ],
)
def test_a_callback_url(url: str) -> None:
    assert a_round(callbackURL=url).callback_url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@h/x",
        "http://user@h/x",
        "http://h:99999/x",
        "http://h:0/x",
        "http://a..b/",
        "http://[zz]/",
        "http://h/x?q=1",
        "http://h/x#f",
        "http://1.2.3.400/",
        "http://h/%zz",
        "http://h/a b",
        "http://h/\n",
        "ftp://h/",
        "http://",
        "h/x",
    ],
)
def test_a_callback_url_that_cannot_be_posted_to(url: str) -> None:
    with pytest.raises(ValidationError, match="callbackURL"):
        a_round(callbackURL=url)


@pytest.mark.parametrize("nonce", [-1, 2**31])
def test_a_proof_of_a_nonce_that_cannot_be(nonce: int) -> None:
    with pytest.raises(ValidationError, match="nonce"):
        Proof.model_validate({"nonce": nonce, "distance": "1.4"})


@pytest.mark.parametrize("target", ["0", "2", "0.000", "-1", "1.4x", "nan", "1e0", "", "1.4\n", ".5", "1."])
def test_a_target_that_none_can_be(target: str) -> None:
    with pytest.raises(ValidationError, match="rTarget"):
        a_round(rTarget=target)
