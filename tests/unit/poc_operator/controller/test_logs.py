# SPDX-License-Identifier: Apache-2.0
"""A JSON line about a round names it, and the pod if there is one, in fields of their own."""

import json
import logging

import pytest
from kopf._core.actions.loggers import ObjectJsonFormatter

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.controller.logs import ObjectLogger, ObjectRef, of
from tests.unit.poc_operator.build import a_pod


def test_round_and_pod_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = ObjectLogger(logging.getLogger("poc_operator.test"), PoCRound.KIND, ObjectRef("ns", "r", "round-uid"))
    log.warning("start: %s", "no answer", extra=of(a_pod("a")))
    line = json.loads(ObjectJsonFormatter().format(caplog.records[0]))
    assert line["message"] == "start: no answer"
    assert line["pod"] == "a"
    assert line["object"] == {
        "apiVersion": "poc.gonka.ai/v1alpha1",
        "kind": "PoCRound",
        "namespace": "ns",
        "name": "r",
        "uid": "round-uid",
    }
