# SPDX-License-Identifier: Apache-2.0
"""Templates of pods: tried on pods, told apart by digests, put back when one has failed, and compared. Pure."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from poc_operator.apis.v1alpha1.fleet_update import FailedUpdate, UpdateStatus
from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, FleetPod
from poc_operator.fleets.checked_pods import CANNOT_CHECK
from poc_operator.fleets.groups import both_templates, leader_template, without_nulls
from poc_operator.fleets.merge import PatchError
from poc_operator.fleets.render import CONTAINER, HASH, Object, signed
from poc_operator.fleets.stages import Nodes, is_homeless, is_late, is_on_lost_node, why_not_running
from poc_operator.observed import PodView

#: So many differences are named in a message, each with so many characters of a value.
_NAMED = 3
_SHOWN = 60
#: What the scheduler says of a pod whose PVC does not exist.
_NO_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found')
#: What it says of a pod that asks for labels which no Kubernetes node has, and where others may have taken the room.
_NO_SUCH_NODE, _NO_ROOM = "node affinity/selector", "Insufficient"
#: Field of a LeaderWorkerSet with the templates of leaders and workers.
_BOTH = "leaderWorkerTemplate"


@dataclass(frozen=True)
class Trial:
    """What shows whether a template works: its pods, with their self-checks and Kubernetes nodes.

    ``checks`` are by the pods' uids. ``limit`` is for how many seconds a pod may come up, and then be checked in vain,
    the latter from the canary's time on. ``told`` is what the status says of the update.
    """

    checks: Mapping[str, FleetPod]
    nodes: Nodes
    now: datetime
    limit: int
    port: int
    checks_pods: bool
    told: UpdateStatus

    def result(self, pod: PodView) -> CheckResult:
        """Return what the self-check of the pod's present server has found."""
        known = self.checks.get(pod.uid)
        if known is None or known.server != pod.server(pod.serving_port(self.port)):
            return CheckResult.PENDING
        return known.result

    def failed_check(self, pod: PodView) -> bool:
        """Whether the pod's server has failed its self-check, so that it takes no part."""
        return self.checks_pods and self.result(pod) is CheckResult.FAILED

    def is_refused(self, pod: PodView) -> bool:
        """Whether a ready pod could not be asked for its self-check last time."""
        known = self.checks.get(pod.uid)
        if not self.checks_pods or not pod.ready or known is None or self.result(pod) is not CheckResult.PENDING:
            return False
        return known.message.startswith(CANNOT_CHECK)

    def is_by_check(self, pod: PodView) -> bool:
        """Whether the pod has failed by its self-check, or by having none."""
        return self.failed_check(pod) or self._cannot_be_checked(pod)

    def why_failed(self, pod: PodView) -> str | None:
        """Say why a pod shows that its template does not work; None if it does not."""
        if self.failed_check(pod):
            found = self.checks[pod.uid].message
            return f"pod {pod.name} failed its self-check{f': {found}' if found else ''}"
        if self._cannot_be_checked(pod):
            message = self.checks[pod.uid].message
            return f"pod {pod.name} has not passed its self-check within {self.limit} s: {message}"
        why = why_not_running(pod, self.nodes, self.now, self.limit)
        if why is None and self._is_left_out(pod) and is_late(pod, self.nodes, self.now, self.limit):
            return f"pod {pod.name} has got no Kubernetes node within {self.limit} s ({pod.waiting_for or 'Pending'})"
        return why

    def proves(self, pod: PodView) -> bool:
        """Whether a pod is to show that its template works. One that no Kubernetes node has room for shows nothing."""
        return not is_homeless(pod, self.now) or self._is_left_out(pod)

    def has_no_node(self, pod: PodView) -> bool:
        """Whether a pod has no Kubernetes node that is well. A new one has none for a moment, which does not count."""
        return is_homeless(pod, self.now) or is_on_lost_node(pod, self.nodes)

    def _is_left_out(self, pod: PodView) -> bool:
        """Whether a pod has no Kubernetes node, and that is its template's fault.

        So it is if the scheduler misses a PVC, or labels of nodes, and the pod before it had one that is still well.
        """
        if pod.node or pod.ready:
            return False
        if _NO_CLAIM.search(pod.waiting_for) is not None:
            return True
        before = self.nodes.get(self.told.canary_node) if self.told.canary == pod.name else None
        is_well = before is not None and before.ready and not before.cordoned
        return is_well and _NO_SUCH_NODE in pod.waiting_for and _NO_ROOM not in pod.waiting_for

    def _cannot_be_checked(self, pod: PodView) -> bool:
        """Whether checks of a ready pod have failed for as long as a pod may take to become ready."""
        since = self.told.canary_time
        if since is None or not self.is_refused(pod) or is_newer(pod, since):
            return False
        return self.now - since > timedelta(seconds=self.limit)


def is_newer(pod: PodView, since: datetime) -> bool:
    """Whether the pod became ready later than that."""
    return pod.ready_since is None or pod.ready_since > since


def failed_as(old: UpdateStatus, digest: str, *, checks_pods: bool) -> FailedUpdate | None:
    """Return how a template with this digest has failed; None if it has not.

    What self-checks have found does not count while there are none.
    """
    counting = (one for one in old.failed if checks_pods or not one.by_self_check)
    return next((one for one in counting if one.digest == digest), None)


def template_of(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pods' template of a StatefulSet, or both templates of a LeaderWorkerSet, of which each is a field."""
    found: Mapping[str, Any] = workload["spec"][_template_field(workload)]
    return found


def _template_field(workload: Mapping[str, Any]) -> str:
    return _BOTH if _BOTH in workload["spec"] else "template"


def server_template_of(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the template of the pods that serve."""
    return _of_servers(template_of(workload))


def _of_servers(template: Mapping[str, Any]) -> Mapping[str, Any]:
    leaders: Mapping[str, Any] = template.get("leaderTemplate", template)
    return leaders


def digest_of(workload: Mapping[str, Any]) -> str:
    """Return the digest of a workload's template as it is wanted: the same for any number of replicas."""
    text = json.dumps(template_of(workload), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_template(workload: Object, template: Mapping[str, Any]) -> Object:
    """Return a StatefulSet or LeaderWorkerSet with the template of a ControllerRevision.

    A LeaderWorkerSet forgets its own once all leaders are ready. Workers are made from that of their leaders then.
    """
    kept = {key: value for key, value in template.items() if not key.startswith("$")}
    field = _template_field(workload)
    if field == _BOTH:
        kept = without_nulls(kept)
        if "leaderTemplate" not in kept:
            kept = both_templates(leader_template(kept), CONTAINER, template_of(workload)["size"])
    return signed({**workload, "spec": {**workload["spec"], field: kept}})


def good_one(workload: Object, template: Mapping[str, Any] | None) -> Object | None:
    """Return the workload with the template of the last good revision; None if that is gone, or makes no workers."""
    try:
        return _with_template(workload, template) if template is not None else None
    except PatchError:
        return None


def follows(leaders: Mapping[str, Any] | None, groups: Mapping[str, Any] | None) -> bool:
    """Whether a StatefulSet of leaders is seen with the template of its LeaderWorkerSet: each is watched by itself."""
    if leaders is None or groups is None:
        return False
    templates = leaders["spec"].get("template") or {}, server_template_of(groups)
    has, wanted = ((one.get("metadata", {}).get("annotations") or {}).get(HASH) for one in templates)
    return has is None or has == wanted


def differences(good: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in which fields of what is wanted a template differs from a good one, the first few of them.

    What the API server has set in the good one beside does not count. Nor do templates of workers, which follow their
    leader's, and its digest.
    """
    before, after = dict(_fields(_of_servers(good), "")), dict(_fields(_of_servers(wanted), ""))
    after.pop(f"metadata.annotations.{HASH}", None)
    found = [_difference(path, before.get(path), value) for path, value in after.items() if before.get(path) != value]
    found += [f"{path} is gone" for path in dict.fromkeys(_items(before)) if path not in {*_items(after)}]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    """Yield the fields of an object that have no fields of their own. Items of lists are told apart by their names."""
    if isinstance(value, Mapping):
        for key, field in value.items():
            yield from _fields(field, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        for item in value:
            yield from _fields({key: field for key, field in item.items() if key != "name"}, f"{path}[{item['name']}]")
    else:
        yield path, value


def _items(paths: Iterable[str]) -> Iterator[str]:
    return (path[: path.rindex("]") + 1] for path in paths if "]" in path)


def _difference(path: str, good: Any, wanted: Any) -> str:  # noqa: ANN401 - JSON
    if isinstance(good, list) and isinstance(wanted, list):
        more, less = ([item for item in one if item not in other] for one, other in ((wanted, good), (good, wanted)))
        good, wanted = (less, more) if more or less else (good, wanted)
    return f"{path} is {_shown(wanted)}" + (f" instead of {_shown(good)}" if good else "")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
