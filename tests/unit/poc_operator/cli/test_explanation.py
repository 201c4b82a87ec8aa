# SPDX-License-Identifier: Apache-2.0
"""Every reason is explained, with a command where it asks something of the user; and what is told of objects."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from string import Formatter
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.cli.explanation import Event, Evidence, account, explained, sentences
from poc_operator.cli.next_steps import COMMANDS, COMMANDS_OF_SELECTORS, Names
from poc_operator.cli.pod_metrics import Chat
from poc_operator.observed import PodView
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.seen import condition

NOW = seen.START + timedelta(seconds=60)


def evidence(body: dict[str, Any] | None = None, **more: Any) -> Evidence:  # noqa: ANN401
    return Evidence(subject=PoCRound.parse(body or seen.a_round()), now=NOW, **more)


def reasons(found: Evidence) -> Sequence[str]:
    return [finding.reason for finding in account(found).findings]


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    finding = explained(reason, "the message", evidence())
    assert finding.seen == "The message."
    assert finding.meaning == EXPLANATIONS[reason].meaning
    assert finding.remedy == (EXPLANATIONS[reason].remedy or "")


def test_a_reason_has_a_command_if_it_asks_something() -> None:
    asking = {reason for reason in Reason if EXPLANATIONS[reason].remedy}
    assert asking - set(COMMANDS) == set()
    fields = {field for text in COMMANDS.values() for _, field, _, _ in Formatter().parse(text) if field}
    assert fields <= set(Names.__dataclass_fields__)


#: Beginnings of commands about what has no namespace.
CLUSTER_WIDE = ("kubectl get nodes ", "kubectl get crd ", "kubectl poc fleet presets")


@pytest.mark.parametrize("command", sorted({*COMMANDS.values(), *COMMANDS_OF_SELECTORS.values()}))
def test_a_command_names_the_namespace_of_what_it_is_about(command: str) -> None:
    assert ("-n {namespace} " in command) != command.startswith(CLUSTER_WIDE)


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (None, "poc.gonka.ai/worker=true"),
        ({"matchLabels": {"model": "m"}}, "model=m"),
        ({"matchExpressions": [{"key": "model", "operator": "In", "values": ["m", "n"]}]}, "'model in (m,n)'"),
    ],
)
def test_without_a_fleet_the_command_shows_what_the_selected_pods_serve(selector: Any, words: str) -> None:  # noqa: ANN401
    body = seen.a_round(
        conditions=[condition("Progressing", "False", "ModelMismatch", "they serve n")], state="Pending"
    )
    assert account(evidence(body)).next == ["kubectl -n poc get pocfleets -o wide"]
    del body["spec"]["fleetRef"]
    body["spec"] |= {"selector": selector} if selector else {}
    (told,) = account(evidence(body)).next
    assert told.startswith(f"kubectl -n poc get pods -l {words} -o 'custom-columns=NAME:.metadata.name,")
    assert told.endswith("ARGS:.spec.containers[*].args'")


def test_a_reason_of_another_version_is_told_as_it_is() -> None:
    finding = explained("MoonFull", "the moon is full", evidence())
    assert (finding.seen, finding.remedy) == ("The moon is full.", "Install the plugin of the operator's version.")


def test_all_reasons_of_a_degraded_round_are_told() -> None:
    degraded = condition(
        "Degraded", "True", "SlotsFailed", "1 slot was given up; 1 of 2 slots wait for a free pod: demo-1"
    )
    body = seen.a_round(conditions=[degraded], degraded="SlotsFailed,SlotsWaiting")
    assert reasons(evidence(body)) == ["SlotsFailed", "SlotsWaiting"]


def test_a_round_that_is_well_has_no_finding_and_is_watched() -> None:
    told = account(evidence(seen.a_round(conditions=[condition("Progressing", "True", "Running", "2 pods compute")])))
    assert (told.findings, told.next) == ([], ["kubectl poc -n poc round watch round-1"])
    assert "Nothing is wrong." in sentences(told)
    assert "pods have delivered 400 nonces at 100.0/s, 40 % of 1000 nonces, 6 s left" in told.summary


def test_pods_that_give_no_answer_are_a_finding() -> None:
    message = "1 pod computes 5 nonces/s; nothing is known of demo-1 (send the token)"
    (finding,) = account(evidence(seen.a_round(message=message))).findings
    assert (finding.reason, finding.seen) == ("PodsSilent", "Nothing is known of demo-1 (send the token).")
    assert not account(evidence(seen.a_round(state="Complete", message=message))).findings


NOTHING = {"checked": 0, "delivered": 0, "valid": 0, "rate": "0.0"}


@pytest.mark.parametrize(
    ("state", "totals", "seconds", "told"),
    [
        ("Complete", NOTHING, 0, ["NoResults"]),
        ("Complete", NOTHING, 13, ["NoResults", "SlotsWaiting"]),
        ("Complete", {"delivered": 400}, 6, ["SlotsWaiting"]),
        ("Complete", {"delivered": 400}, 5, []),
        ("Running", NOTHING, 13, []),
    ],
)
def test_what_a_complete_round_lacks_is_told(state: str, totals: dict[str, Any], seconds: int, told: list[str]) -> None:
    """It has run for a minute; of the time that its slots had no pod, a tenth and more counts."""
    body = seen.a_round(state=state, stopTime=NOW.isoformat(), slotWaits=[{"node": 0, "group": 0, "seconds": seconds}])
    body["status"]["totals"] |= totals
    found = evidence(body)
    assert reasons(found) == told
    assert ("Nothing is wrong." in sentences(account(found))) == (not told)
    waited = [finding.seen for finding in account(found).findings if finding.reason == "SlotsWaiting"]
    assert waited in ([], [f"Slots had no pod for a part of the 60 s: node 0 group 0 ({seconds} s)."])


def test_a_finished_round_is_told_by_its_outcome_alone() -> None:
    conditions = [
        condition("Failed", "True", "DeadlineExceeded", "activeDeadlineSeconds of 60 are over"),
        condition("Progressing", "False", "DeadlineExceeded", "over"),
    ]
    body = seen.a_round(state="Failed", conditions=conditions)
    found = evidence(body, pods=[PodView.parse(seen.a_pod("demo-0", ready=False))], operator="no operator is installed")
    assert reasons(found) == ["DeadlineExceeded"]


def test_the_command_is_about_the_pod_that_the_message_names() -> None:
    stalled = condition(
        "Degraded", "True", "SlotsStalled", "1 slot gets nothing done, the first: pod demo-11 is silent"
    )
    pods = [PodView.parse(seen.a_pod(name)) for name in ("demo-0", "demo-1", "demo-11")]
    told = account(evidence(seen.a_round(conditions=[stalled], degraded="SlotsStalled"), pods=pods))
    assert told.next == ["kubectl -n poc logs demo-11 --tail=50"]


def test_an_operator_that_is_away_and_a_change_that_nobody_saw_are_told() -> None:
    body = seen.a_round()
    body["metadata"]["generation"] = 2
    assert reasons(evidence(body, operator="no operator is installed")) == ["OperatorAway", "ChangeNotSeen"]


def test_a_round_that_is_being_deleted_is_told() -> None:
    body = seen.a_round()
    body["metadata"]["deletionTimestamp"] = seen.START.isoformat()
    (finding,) = account(evidence(body)).findings
    assert (finding.reason, "its pods are stopped" in finding.meaning) == ("Deleted", True)


def test_chat_that_holds_a_round_back_is_told() -> None:
    chat = {("poc", "demo-0"): Chat(held=True, seconds=5), ("poc", "demo-1"): Chat()}
    (finding,) = account(evidence(chat=chat)).findings
    assert finding.seen == "Chat holds PoC back on 1 of 2 pods: demo-0."


def test_what_is_wrong_with_the_fleet_is_told_of_its_round() -> None:
    degraded = condition("Degraded", "True", "PodsFailing", "demo-1: CrashLoopBackOff")
    fleet = PoCFleet.parse(seen.a_fleet(conditions=[degraded]))
    (finding,) = account(evidence(fleet=fleet)).findings
    assert finding.seen == 'Its fleet "demo": demo-1: CrashLoopBackOff.'
    (own,) = account(replace(evidence(), subject=fleet)).findings
    assert own.reason == "PodsFailing"


def test_only_the_first_pods_that_are_not_ready_are_named() -> None:
    pods = [PodView.parse(seen.a_pod(f"demo-{number}", ready=False)) for number in range(8)]
    findings = account(evidence(pods=pods)).findings
    assert [finding.seen for finding in findings[5:]] == ["3 more pods are not ready."]


def test_events_are_the_last_warnings() -> None:
    events = [
        replace(_event(f"message {number}"), time=datetime(2026, 1, 1, 0, number, tzinfo=UTC)) for number in range(7)
    ]
    assert [one.split(": ")[2] for one in account(evidence(events=events)).events] == [
        f"message {number} (2 times)" for number in range(2, 7)
    ]


def _event(message: str) -> Event:
    return Event.parse(seen.an_event("WorkLost", message))
