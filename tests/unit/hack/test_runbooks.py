# SPDX-License-Identifier: Apache-2.0
"""Runbooks: one for each alert, and one for each reason that needs something from a person."""

import re

import pytest

from hack.generate import runbooks
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.reasons import Reason

FOUND = runbooks.read()
NEED = {str(reason) for reason, told in EXPLANATIONS.items() if told.remedy}


def test_every_alert_has_a_runbook() -> None:
    assert FOUND.alerts.keys() == {rule["alert"] for rule in runbooks.rules()}


def test_every_reason_with_a_remedy_has_a_runbook() -> None:
    assert FOUND.reasons.keys() == NEED


def test_every_reason_has_a_section() -> None:
    pages = [page for path, page in runbooks.render().items() if not path.endswith("alerts.md")]
    headings = {heading for page in pages for heading in re.findall(r"^## (\w+)$", page, re.MULTILINE)}
    assert headings == {str(reason) for reason in Reason}


@pytest.mark.parametrize(
    ("word", "reasons"),
    [
        ("ErrImagePull", {"PodsFailing", "UpdateFailed"}),
        ("ImagePullBackOff", {"PodsFailing", "NoPodReady"}),
        ("CrashLoopBackOff", {"PodsFailing"}),
    ],
)
def test_what_kubectl_shows_of_a_pod_leads_to_a_runbook(word: str, reasons: set[str]) -> None:
    sections = [part for page in runbooks.render().values() for part in page.split("\n## ")[1:]]
    assert reasons <= {part.partition("\n")[0] for part in sections if word in part}


@pytest.mark.parametrize("steps", [*FOUND.alerts.values(), *FOUND.reasons.values()])
def test_names_in_steps_exist(steps: runbooks.Steps) -> None:
    assert {*steps.diagnose, *steps.fix} <= FOUND.commands.keys()
    assert steps.diagnose
    assert steps.escalate in FOUND.escalations


def test_every_command_is_used() -> None:
    used = {
        name for steps in (*FOUND.alerts.values(), *FOUND.reasons.values()) for name in (*steps.diagnose, *steps.fix)
    }
    assert FOUND.commands.keys() == used


def test_alerts_name_the_reasons_by_their_urgency() -> None:
    """What must be mended now pages at once, what is for today after a while; the rest is the author's."""
    patterns = {
        rule["alert"]: set(re.findall(r'reason=~"([^"]*)"', rule["expr"])[0].split("|"))
        for rule in runbooks.rules()
        if rule["alert"] in ("PoCWorkDegraded", "PoCWorkImpaired")
    }
    degraded = {
        str(reason)
        for reason, told in EXPLANATIONS.items()
        if "Degraded=True" in told.where and told.kinds != {"PoCFleet"} and told.remedy
    }
    by_urgency = {
        urgency: {name for name in degraded if FOUND.reasons[name].urgency == urgency} for urgency in ("now", "today")
    }
    # The gateway pages for the same by itself: PoCReceiverUnreachable.
    assert patterns["PoCWorkDegraded"] == by_urgency["now"] - {"ReceiverFailing"}
    # Reference pods end so: their results that were under way at the end are lost by design.
    assert patterns["PoCWorkImpaired"] == by_urgency["today"] - {"DeliveryIncomplete"}
