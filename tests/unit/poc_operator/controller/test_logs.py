# SPDX-License-Identifier: Apache-2.0
"""A JSON line about an object names it, and what is bound: round, slot and pod in fields of their own."""

import json
import logging

import pytest
from kopf._core.actions.loggers import ObjectJsonFormatter

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from vllm_poc.logs import BoundFields, bound


def test_object_round_slot_and_pod_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = ObjectLogger(logging.getLogger("poc_operator.test"), PoCRound.KIND, ObjectRef("ns", "r", "round-uid"))
    log.logger.addFilter(BoundFields())
    with bound(round="round-uid"), bound(pod="a", slot=0):
        log.warning("start: %s", "no answer")
    line = json.loads(ObjectJsonFormatter().format(caplog.records[0]))
    assert line["message"] == "start: no answer"
    assert (line["round"], line["slot"], line["pod"]) == ("round-uid", 0, "a")
    assert line["object"] == {
        "apiVersion": "poc.gonka.ai/v1alpha1",
        "kind": "PoCRound",
        "namespace": "ns",
        "name": "r",
        "uid": "round-uid",
    }
