# SPDX-License-Identifier: Apache-2.0
"""Templates of pods: told apart by digests, put back when one has failed, and compared for people. Pure."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from poc_operator.apis.v1alpha1.fleet_update import FailedUpdate, UpdateStatus
from poc_operator.fleets.groups import without_nulls
from poc_operator.fleets.render import Object, signed

#: So many differences are named in a message, each with so many characters of a value.
_NAMED = 3
_SHOWN = 60
#: Field of a LeaderWorkerSet with the templates of leaders and workers.
_BOTH = "leaderWorkerTemplate"


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
    found = template_of(workload)
    leaders: Mapping[str, Any] = found.get("leaderTemplate", found)
    return leaders


def digest_of(workload: Mapping[str, Any]) -> str:
    """Return the digest of a workload's template as it is wanted: the same for any number of replicas."""
    text = json.dumps(template_of(workload), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_template(workload: Object, template: Mapping[str, Any]) -> Object:
    """Return a StatefulSet or LeaderWorkerSet with the template of a ControllerRevision."""
    kept = {key: value for key, value in template.items() if not key.startswith("$")}
    field = _template_field(workload)
    return signed({**workload, "spec": {**workload["spec"], field: without_nulls(kept) if field == _BOTH else kept}})


def differences(good: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in which fields of what is wanted a template differs from a good one, the first few of them.

    What the API server has set in the good one beside does not count.
    """
    before, after = dict(_fields(good, "")), dict(_fields(wanted, ""))
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
