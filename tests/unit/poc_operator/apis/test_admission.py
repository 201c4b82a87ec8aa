# SPDX-License-Identifier: Apache-2.0
"""What the schema accepts and refuses, by the offline evaluator; a real API server judges the same specs."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hack.generate.__main__ import KINDS
from hack.generate.crds import spec_model
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, PoCRound
from tests.support.builders.specs import FULL, edges, specs
from tests.support.checks.admission import admitted

_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND.kind)


@_KIND
def test_full_specs_are_accepted(kind: type[Resource]) -> None:
    assert [admitted(kind, spec)[1] for spec in FULL[kind]] == [[] for _ in FULL[kind]]


@_KIND
def test_what_the_schema_accepts_at_the_edges_the_models_read(kind: type[Resource]) -> None:
    accepted = refused = 0
    for name, spec in edges(kind):
        stored, flaws = admitted(kind, spec)
        if flaws:
            refused += 1
        else:
            accepted += 1
            assert spec_model(kind).model_validate(stored), name
    assert accepted > 30
    assert refused > 60


@_KIND
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_random_specs_are_accepted_and_read(kind: type[Resource], data: st.DataObject) -> None:
    stored, flaws = admitted(kind, data.draw(specs(kind)))
    assert flaws == []
    assert spec_model(kind).model_validate(stored)


def test_a_secret_for_the_receiver_needs_its_address() -> None:
    full = FULL[PoCRound][0]
    assert admitted(PoCRound, full)[1] == []
    without = {name: value for name, value in full.items() if name != "callbackURL"}
    assert admitted(PoCRound, without)[1] == [
        "spec: callbackSecretRef needs callbackURL: set it, or remove callbackSecretRef"
    ]


def test_a_gpus_product_needs_a_number_where_no_preset_has_one() -> None:
    """Or pods would wait for a Kubernetes node with such GPUs and get none of them."""
    product = {"product": "NVIDIA-H200"}
    (flaw,) = admitted(PoCFleet, {"model": {"path": "org/model"}, "gpu": product})[1]
    assert flaw.startswith("spec: gpu.product needs gpu.count with model.path, or pods get no GPU: set gpu.count")
    for model, gpu in (
        ({"path": "org/model"}, {**product, "count": 1}),
        ({"path": "org/model"}, {}),
        ({"preset": "minimax-m2.7"}, product),
    ):
        assert admitted(PoCFleet, {"model": model, "gpu": gpu})[1] == []


def test_a_round_has_no_more_slots_than_its_status_can_list() -> None:
    """One with millions of them would take the memory of the operator, and with it all other rounds."""
    full = FULL[PoCRound][0]
    most = {"first": 0, "last": MAX_SLOTS // 2 - 1, "count": 100_000, "groups": 2}
    assert admitted(PoCRound, {**full, "nodes": most})[1] == []
    for more in ({**most, "groups": 3}, {**most, "last": MAX_SLOTS // 2}, {**most, "last": MAX_SLOTS, "groups": 1}):
        (flaw,) = admitted(PoCRound, {**full, "nodes": more})[1]
        assert "has too many slots" in flaw
