# SPDX-License-Identifier: Apache-2.0
"""The specs that revisions of a fleet's pods were made from, so that an update can be undone. Pure.

A fleet's StatefulSet has in the annotation `RECORD` what of the spec its template was made from. Kubernetes copies a
StatefulSet's annotations to each ControllerRevision that it makes of it. So every revision has its spec, for as long as
Kubernetes keeps it, and the operator keeps no history of its own. While a failed template is replaced by the last good
one, the StatefulSet has no such annotation: its template is not that of the spec.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from poc_operator.apis.v1alpha1.fleet import FleetSpec, PoCFleet
from poc_operator.apis.v1alpha1.meta import GROUP
from poc_operator.apis.v1alpha1.schema import aliases
from poc_operator.fleets.render import object_of, signed
from poc_operator.fleets.resolve import Resolved
from poc_operator.fleets.rollback import differences

Object = Mapping[str, Any]

#: Annotation of a StatefulSet and its revisions: the fields of the fleet's spec that its template was made from.
RECORD = f"{GROUP}/template-spec"
#: Longest record: all annotations of an object may have 256 KiB.
MAX_BYTES = 128 * 1024
#: Fields of the spec that are about no template. `kubectl rollout undo` leaves them alone, too.
NOT_OF_TEMPLATES = frozenset({"replicas", "update", "self_check", "healing", "disruption_budget", "metrics"})
_NAMES = aliases(FleetSpec)
_OF_TEMPLATES = _NAMES.keys() - NOT_OF_TEMPLATES


class UndoError(Exception):
    """Why there is nothing to go back to, and what helps."""


@dataclass(frozen=True)
class Revision:
    """A revision of a fleet's template. ``record`` is what it was made from, None if that is not known."""

    number: int
    name: str
    created: str
    record: Object | None

    def __str__(self) -> str:
        return f"revision {self.number} ({self.name})"


def record_of(spec: FleetSpec) -> Object:
    """Return the fields of a spec that the pods' template is made from, as JSON."""
    found = spec.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(_OF_TEMPLATES))
    if spec.pod_template is not None and spec.pod_template.spec is not None:
        found["podTemplate"] = {**found["podTemplate"], "spec": spec.pod_template.spec}  # null removes a field there
    return found


def recorded(fleet: PoCFleet, body: dict[str, Any]) -> dict[str, Any]:
    """Return a StatefulSet with its record, unless that is too long to be stored; another object as it is."""
    if body["kind"] != "StatefulSet":
        return body
    text = json.dumps(record_of(fleet.spec), sort_keys=True, separators=(",", ":"))
    if len(text.encode()) > MAX_BYTES:
        return body
    metadata = body["metadata"]
    return {**body, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), RECORD: text}}}


def record_in(body: Object) -> Object | None:
    """Return the record of a StatefulSet or a revision, as this version understands it; None if there is none."""
    text = (body["metadata"].get("annotations") or {}).get(RECORD)
    try:
        return record_of(FleetSpec.model_validate_json(text)) if text is not None else None
    except ValidationError:
        return None


@dataclass(frozen=True)
class Known:
    """What a fleet was last known to serve, and the spec that it was known of."""

    spec: FleetSpec
    resolved: Resolved

    def fleet(self, fleet: PoCFleet) -> PoCFleet:
        """Return the fleet with the spec of then. What is about no template is that of now."""
        return _with_template_of(fleet, self.spec)


def fleet_before(fleet: PoCFleet, workload: Object) -> PoCFleet:
    """Return the fleet with the spec that its workload was made from, as far as that is recorded."""
    record = record_in(workload)
    return fleet if record is None else _with_template_of(fleet, FleetSpec.model_validate(record))


def serves_the_same(one: FleetSpec, other: FleetSpec) -> bool:
    """Whether two specs resolve to the same model, GPUs and flags, wherever the first one does."""
    return (one.model, one.gpu, one.parallelism, one.engine_args) == (
        other.model,
        other.gpu,
        other.parallelism,
        other.engine_args,
    )


def _with_template_of(fleet: PoCFleet, spec: FleetSpec) -> PoCFleet:
    now = {name: getattr(fleet.spec, name) for name in NOT_OF_TEMPLATES}
    return fleet.model_copy(update={"spec": spec.model_copy(update=now)})


def rescaled(fleet: PoCFleet, workload: Object) -> dict[str, Any]:
    """Return the workload that there is with the fleet's number of replicas, and its template as it is."""
    metadata = workload["metadata"]
    spec = {**workload["spec"], "replicas": fleet.spec.replicas}
    body = signed(object_of(workload["apiVersion"], workload["kind"], metadata["name"], fleet, spec))
    kept = {name: text for name, text in (metadata.get("annotations") or {}).items() if name == RECORD}
    return {**body, "metadata": {**body["metadata"], "annotations": {**kept, **body["metadata"]["annotations"]}}}


def revisions_of(stateful_set: Object, bodies: Iterable[Object]) -> Sequence[Revision]:
    """Return a StatefulSet's revisions, the oldest first."""
    uid = stateful_set["metadata"]["uid"]
    own = [
        body
        for body in bodies
        if any(owner.get("uid") == uid for owner in body["metadata"].get("ownerReferences") or [])
    ]
    found = [
        Revision(
            number=int(body["revision"]),
            name=str(body["metadata"]["name"]),
            created=str(body["metadata"].get("creationTimestamp") or ""),
            record=record_in(body),
        )
        for body in own
    ]
    return sorted(found, key=lambda revision: revision.number)


def present(fleet: PoCFleet, stateful_set: Object) -> str | None:
    """Return the name of the revision that the fleet's spec asks for; None while no revision was made from it.

    That is so as long as the operator has yet to see the spec, waits for a download, or has put a good template back.
    """
    if record_in(stateful_set) != record_of(fleet.spec):
        return None
    return (stateful_set.get("status") or {}).get("updateRevision")


def target(fleet: PoCFleet, stateful_set: Object, found: Sequence[Revision], number: int | None) -> Revision:
    """Return the revision to go back to: the one with this number, else that before the present one. UndoError."""
    now, failed = present(fleet, stateful_set), {one.revision: one.message for one in fleet.status.update.failed}
    if number is None:
        earlier = [revision for revision in found if revision.name != now and revision.name not in failed]
        if not earlier:
            raise UndoError("there is no earlier revision that has not failed: apply the spec that you want")
        return earlier[-1]
    chosen = next((revision for revision in found if revision.number == number), None)
    if chosen is None:
        known = ", ".join(str(revision.number) for revision in found) or "none"
        raise UndoError(f"there is no revision {number}: choose one of those that there are ({known})")
    if chosen.name == now:
        raise UndoError(f"{chosen} is that of the present spec: nothing was changed")
    if chosen.name in failed:
        raise UndoError(f"{chosen} has failed and is not tried again ({failed[chosen.name]}): choose another one")
    return chosen


def restored(spec: Object, revision: Revision) -> dict[str, Any]:
    """Return a fleet's spec with what the revision was made from; all else stays as it is. UndoError.

    A cache that is the same claim stays too: a PVC can grow and cannot shrink.
    """
    if revision.record is None:
        raise UndoError(
            f"{revision} has no record of its spec: an earlier operator made it, or its spec has more than "
            f"{MAX_BYTES // 1024} KiB. Apply the earlier spec"
        )
    others = {_NAMES[name] for name in NOT_OF_TEMPLATES}
    made = {**{name: value for name, value in spec.items() if name in others}, **revision.record}
    if "cache" in spec and _claim(spec["cache"]) == _claim(made["cache"]):
        made["cache"] = spec["cache"]
    if record_of(FleetSpec.model_validate(made)) == record_of(FleetSpec.model_validate(spec)):
        raise UndoError(
            f"{revision} was made from the same spec. What differs comes from a preset or from fleets.image of the "
            "operator's chart: set spec.image or spec.engineArgs to what you want"
        )
    return made


def _claim(cache: Object) -> tuple[str | None, bool]:
    return cache.get("existingClaim"), "size" in cache


def changes(before: Object | None, after: Object | None) -> str:
    """Say in which fields a record differs from another one."""
    if before is None or after is None:
        return "the spec was not recorded"
    gone = [f"{name} is gone" for name in before if name not in after]
    return ", ".join(filter(None, [differences(before, after), *gone])) or "nothing in the spec"
