# SPDX-License-Identifier: Apache-2.0
"""Fleets for tests, and what they are resolved in."""

from typing import Any

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.fleets.resolve import Surroundings, packaged
from tests.unit.poc_operator.build import NOW

AROUND = Surroundings(presets=packaged(), products=["NVIDIA-H200"], image="registry/worker:1")
PATH = {"model": {"path": "org/model"}}


def a_fleet(name: str = "demo", *, uid: str = "fleet-uid", status: Any = None, **spec: Any) -> PoCFleet:  # noqa: ANN401
    """Return a fleet of a path without self-checks, unless ``spec`` has another model, or says more of these."""
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "generation": 3,
        "resourceVersion": "7",
        "creationTimestamp": NOW.isoformat(),
    }
    body = {"metadata": metadata, "spec": {**PATH, "selfCheck": {"enabled": False}, **spec}}
    return PoCFleet.parse(body if status is None else {**body, "status": status})
