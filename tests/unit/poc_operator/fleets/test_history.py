# SPDX-License-Identifier: Apache-2.0
"""Which revision an update goes back to, and what of its spec comes back."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import FleetSpec
from poc_operator.fleets.history import (
    MAX_BYTES,
    RECORD,
    Revision,
    UndoError,
    changes,
    record_of,
    restored,
    revisions_of,
    target,
)
from poc_operator.fleets.plan import FleetSnapshot, plan
from poc_operator.fleets.rollback import good_one, template_of
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, PATH, a_fleet

UID = "set-uid"
FEW, MANY = ["--max-num-seqs=1"], ["--max-num-seqs=9"]


@dataclass
class History:
    """A StatefulSet as Kubernetes keeps it: a revision of each template, with the annotations of that moment."""

    revisions: list[dict[str, Any]] = field(default_factory=list)
    stateful_set: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)

    def apply(self, **spec: Any) -> None:  # noqa: ANN401
        """Let the operator make its objects of this spec."""
        self.spec = {**PATH, **spec}
        step = plan(FleetSnapshot(fleet=a_fleet(**self.spec), around=AROUND, now=NOW))
        self._take(next(body for body in step.apply if body["kind"] == "StatefulSet"))

    def roll_back(self, name: str, why: str) -> None:
        """Let the operator put the template of a good revision in the place of one that has failed."""
        newest = self.stateful_set["status"]["updateRevision"]
        self.failed.append({"digest": newest, "revision": newest, "message": why, "time": NOW.isoformat()})
        good = next(one for one in self.revisions if one["metadata"]["name"] == name)
        back = good_one(self.stateful_set, good["data"])
        assert back is not None
        self._take(back)

    def _take(self, body: dict[str, Any]) -> None:
        number = max((one["revision"] for one in self.revisions), default=0) + 1
        known = next((one for one in self.revisions if one["data"] == template_of(body)), None)
        if known is None:
            metadata = {
                "name": f"demo-{chr(ord('a') + len(self.revisions))}",
                "annotations": dict(body["metadata"]["annotations"]),
                "creationTimestamp": NOW.isoformat(),
                "ownerReferences": [{"uid": UID}],
            }
            known = {"metadata": metadata, "data": template_of(body), "revision": number}
            self.revisions.append(known)
        known["revision"] = number
        metadata = {**body["metadata"], "uid": UID}
        self.stateful_set = {**body, "metadata": metadata, "status": {"updateRevision": known["metadata"]["name"]}}

    def target(self, number: int | None = None) -> Revision:
        fleet = a_fleet(**self.spec, status={"update": {"failed": self.failed}})
        return target(fleet, self.stateful_set, revisions_of(self.stateful_set, self.revisions), number)

    def undo(self, number: int | None = None) -> str:
        """Go back, let the operator follow, and return the name of the revision that the pods get."""
        self.apply(**restored(a_spec(self.spec), self.target(number)))
        return str(self.stateful_set["status"]["updateRevision"])


def a_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec as the API server has it, with its defaults."""
    return FleetSpec.model_validate(spec).model_dump(mode="json", by_alias=True, exclude_none=True)


def test_undo_goes_to_the_revision_before_and_back_again() -> None:
    history = History()
    history.apply(engineArgs=FEW, replicas=2)
    history.apply(engineArgs=MANY, replicas=3)
    assert history.undo() == "demo-a"
    assert (history.spec["engineArgs"], history.spec["replicas"]) == (FEW, 3)
    assert history.undo() == "demo-b"
    assert history.spec["engineArgs"] == MANY


def test_a_revision_is_chosen_by_its_number() -> None:
    history = History()
    for args in ([], FEW, MANY):
        history.apply(engineArgs=args)
    assert history.undo(1) == "demo-a"
    assert [one.number for one in revisions_of(history.stateful_set, history.revisions)] == [2, 3, 4]
    for number, says in ((4, "that of the present spec"), (7, "choose one of those that there are (2, 3, 4)")):
        with pytest.raises(UndoError, match=r".") as error:
            history.undo(number)
        assert says in str(error.value)


def test_after_a_failure_undo_goes_to_what_the_operator_put_back() -> None:
    history = History()
    history.apply(engineArgs=FEW)
    history.apply(engineArgs=MANY)
    history.roll_back("demo-a", "OOMKilled")
    assert RECORD not in history.stateful_set["metadata"]["annotations"]
    with pytest.raises(UndoError, match=r"revision 2 \(demo-b\) has failed and is not tried again \(OOMKilled\)"):
        history.undo(2)
    assert history.undo() == "demo-a"
    assert history.spec["engineArgs"] == FEW
    with pytest.raises(UndoError, match="no earlier revision that has not failed"):
        history.undo()  # there is the failed one alone


def test_a_change_that_the_operator_has_not_followed_yet_is_taken_back() -> None:
    """As while a download is under way, or no operator runs."""
    history = History()
    history.apply(engineArgs=FEW)
    history.apply(engineArgs=MANY)
    history.spec = {**history.spec, "model": {"path": "org/other"}}
    assert history.undo() == "demo-b"
    assert history.spec["model"] == {"path": "org/model"}


def test_a_change_that_makes_no_template_is_none_to_go_back_from() -> None:
    history = History()
    history.apply(engineArgs=FEW, cache={"size": "1Gi"})
    history.apply(engineArgs=MANY, cache={"size": "1Gi"})
    history.apply(engineArgs=MANY, cache={"size": "2Gi"}, replicas=7, update={"maxUnavailable": 2})
    assert history.undo() == "demo-a"
    assert history.spec["cache"]["size"] == "2Gi", "a PVC cannot shrink"
    assert (history.spec["replicas"], history.spec["update"]["maxUnavailable"]) == (7, 2)


def test_another_claim_comes_back_whole() -> None:
    history = History()
    history.apply(cache={"existingClaim": "old"})
    history.apply(cache={"size": "1Gi", "accessMode": "ReadWriteOnce"})
    history.undo()
    assert history.spec["cache"] == {"existingClaim": "old", "download": False}


def test_nulls_of_a_pod_template_come_back() -> None:
    template = {"spec": {"priorityClassName": None, "tolerations": [{"operator": "Exists"}]}}
    history = History()
    history.apply(podTemplate=template)
    history.apply()
    history.undo()
    assert history.spec["podTemplate"] == template


def test_what_changed_without_the_spec_cannot_be_undone_by_it() -> None:
    history = History()
    history.apply(engineArgs=FEW)
    history.revisions[0]["data"] = {**history.revisions[0]["data"], "spec": "of an earlier fleets.image"}
    history.apply(engineArgs=FEW)
    with pytest.raises(UndoError, match=r"revision 1 \(demo-a\) was made from the same spec\. .*fleets\.image"):
        history.undo()


@pytest.mark.parametrize("annotations", [{}, {RECORD: "{"}, {RECORD: '{"model": {}, "port": "no port"}'}])
def test_a_revision_without_a_record_is_told(annotations: dict[str, str]) -> None:
    history = History()
    history.apply(engineArgs=FEW)
    history.revisions[0]["metadata"]["annotations"] = annotations
    history.apply(engineArgs=MANY)
    with pytest.raises(UndoError, match="has no record of its spec"):
        history.undo()


def test_a_spec_that_is_too_long_is_not_recorded() -> None:
    env = [{"name": f"V{number}", "value": "x" * 4096} for number in range(MAX_BYTES // 4096)]
    history = History()
    history.apply(env=env)
    assert RECORD not in history.stateful_set["metadata"]["annotations"]


def test_revisions_of_others_are_none_of_the_fleet() -> None:
    history = History()
    history.apply()
    stranger = {"metadata": {"name": "x", "ownerReferences": [{"uid": "other"}]}, "revision": 9, "data": {}}
    assert [one.name for one in revisions_of(history.stateful_set, [stranger, *history.revisions])] == ["demo-a"]


def test_a_record_has_what_makes_the_template_and_no_more() -> None:
    full: dict[str, Any] = {
        "replicas": 5,
        "update": {"paused": True},
        "selfCheck": {"enabled": False},
        "healing": {"enabled": False},
        "disruptionBudget": {"maxUnavailable": 2},
        "metrics": {"podMonitor": True},
    }
    step = plan(FleetSnapshot(fleet=a_fleet(**full), around=AROUND, now=NOW))
    body = next(body for body in step.apply if body["kind"] == "StatefulSet")
    plain = next(
        body
        for body in plan(FleetSnapshot(fleet=a_fleet(), around=AROUND, now=NOW)).apply
        if body["kind"] == "StatefulSet"
    )
    assert template_of(body) == template_of(plain)
    record = json.loads(body["metadata"]["annotations"][RECORD])
    assert record == json.loads(json.dumps(record_of(a_fleet().spec)))
    assert not full.keys() & record.keys()
    others = [other for other in step.apply if other["kind"] != "StatefulSet"]
    assert all(RECORD not in other["metadata"]["annotations"] for other in others)


def test_changes_are_named() -> None:
    before = record_of(FleetSpec.model_validate({**PATH, "engineArgs": FEW, "image": "a:1", "host": "::"}))
    after = record_of(FleetSpec.model_validate({**PATH, "engineArgs": MANY, "image": "a:2"}))
    said = changes(before, after)
    assert 'engineArgs is ["--max-num-seqs=9"] instead of ["--max-num-seqs=1"]' in said
    assert "image is a:2 instead of a:1" in said
    assert said.endswith("host is gone")
    assert changes(before, before) == "nothing in the spec"
    assert changes(before, None) == "the spec was not recorded"
