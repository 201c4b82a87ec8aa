# SPDX-License-Identifier: Apache-2.0
"""Checked proofs, a calibrated target and compared pods, on real vLLM."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hack.cluster.layout import HOST_ADDRESS
from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE
from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.calibrations.plan import valid_rate
from tests.cluster.objects import ARTIFACT, BLOCK, Objects, Rounds
from tests.cluster.results import Value, items
from tests.support.fakes.receiver import Receiver, receiving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240, func_only=True)]

CLAIMS = "claims"
COUNT = 300
#: Of artifacts that were computed on the same pods, next to none mismatch.
STRICT = {"distThreshold": "0.02", "pMismatch": "0.001", "pValueThreshold": "0.01"}
FROM_CONFIG_MAP: dict[str, Any] = {"proofs": {"configMap": {"name": CLAIMS}}, "statTest": STRICT}


@pytest.fixture
def validations(kube: Kube) -> Iterator[Objects[PoCValidation]]:
    """Validations of artifacts; what a test leaves behind is deleted."""
    with Objects(kube, NAMESPACE, PoCValidation, {**BLOCK, "artifact": {"kDim": 12}}) as own:
        yield own


@pytest.fixture
def calibrations(kube: Kube) -> Iterator[Objects[PoCCalibration]]:
    """Calibrations; what a test leaves behind is deleted."""
    with Objects(kube, NAMESPACE, PoCCalibration, BLOCK) as own:
        yield own


@pytest.fixture(scope="module")
def artifacts(kube: Kube) -> Iterator[dict[int, Value]]:
    """What honest pods delivered."""
    with receiving(HOST_ADDRESS) as receiver, Rounds(kube, NAMESPACE) as rounds:
        rounds.run_to_the_end("proven", **ARTIFACT, callbackURL=receiver.url, stop={"afterNonces": COUNT})
        rounds.settled("proven")
        yield dict(sorted(items(receiver.bodies))[:COUNT])


@contextmanager
def claims(kube: Kube, vectors: dict[int, Value]) -> Iterator[dict[str, Any]]:
    """A ConfigMap that claims these vectors, and what a validation's spec says to check it."""
    proofs = json.dumps([{"nonce": nonce, "vector": vector} for nonce, vector in vectors.items()])
    metadata = {"name": CLAIMS, "namespace": NAMESPACE}
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"proofs.json": proofs}})
    yield FROM_CONFIG_MAP
    kube.kubectl("--namespace", NAMESPACE, "delete", "configmap", CLAIMS)


def test_what_honest_pods_delivered_is_no_fraud(
    kube: Kube, validations: Objects[PoCValidation], artifacts: dict[int, Value]
) -> None:
    with claims(kube, artifacts) as spec:
        done = validations.run_to_the_end("honest", **spec).status
    assert done.verdict is not None
    assert (done.verdict.total, done.verdict.mismatches, done.verdict.fraud) == (COUNT, 0, False)
    assert done.outcome is not None
    assert done.outcome.reason == Reason.NO_FRAUD_DETECTED


def test_a_sample_of_what_the_gateway_has_is_no_fraud(
    validations: Objects[PoCValidation], artifacts: dict[int, Value]
) -> None:
    # The round itself may be gone by now: what it delivered is the gateway's.
    proofs = {"round": {"name": "proven", "nonces": 40}}
    done = validations.run_to_the_end("sampled", proofs=proofs).status
    assert done.verdict is not None
    assert (done.verdict.total, done.verdict.mismatches, done.verdict.fraud) == (40, 0, False)


def test_exchanged_vectors_are_fraud(
    kube: Kube, validations: Objects[PoCValidation], artifacts: dict[int, Value]
) -> None:
    liars = list(artifacts)[:10]
    exchanged = dict(zip(liars, [artifacts[nonce] for nonce in [*liars[1:], liars[0]]], strict=True))
    with claims(kube, artifacts | exchanged) as spec:
        done = validations.run_to_the_end("fraud", **spec).status
    assert done.verdict is not None
    assert (done.mismatch_nonces, done.verdict.fraud) == (liars, True)


def test_a_validation_waits_for_its_config_map(
    kube: Kube, validations: Objects[PoCValidation], artifacts: dict[int, Value]
) -> None:
    validations.apply("early", **FROM_CONFIG_MAP)
    message = validations.wait_for_reason("early", "Accepted", Reason.PROOFS_UNAVAILABLE)
    assert message == f'there is no ConfigMap "{CLAIMS}" in namespace "{NAMESPACE}": create it'
    with claims(kube, artifacts):
        validations.wait("early", "condition=Complete")


def test_the_calibrated_target_gives_the_wanted_rate(calibrations: Objects[PoCCalibration]) -> None:
    found = calibrations.run_to_the_end("calibrated", validRate="0.3", nonces=2000).status.target
    assert found is not None
    assert float(found.low) < float(found.r_target) < float(found.high)
    assert float(found.theory_rate) == pytest.approx(0.3, abs=0.1)
    assert valid_rate(float(found.low)) < 0.3 < valid_rate(float(found.high))
    assert found.agrees


def test_pods_that_serve_the_same_agree_while_the_round_runs(rounds: Rounds, receiver: Receiver) -> None:
    rounds.apply("compared", **ARTIFACT, callbackURL=receiver.url, crossCheck={"intervalSeconds": 10})
    compared = rounds.wait_until(
        "compared", lambda r: r.status.cross_check is not None and r.status.cross_check.number > 1
    )
    check = compared.status.cross_check
    assert check is not None
    assert check.deviating == []
    rounds.patch("compared", suspend=True)
    rounds.wait("compared", "condition=Suspended")
    delivered = [nonce for nonce, _ in items(receiver.bodies)]
    assert len(delivered) == len(set(delivered)), "what is compared is not delivered"
