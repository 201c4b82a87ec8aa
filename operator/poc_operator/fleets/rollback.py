# SPDX-License-Identifier: Apache-2.0
"""Templates of pods: told apart by digests, put back when one has failed, and compared for people. Pure."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from poc_operator.fleets.render import Object, signed

#: So many differences are named in a message, each with so many characters of a value.
_NAMED = 3
_SHOWN = 60


def digest_of(stateful_set: Mapping[str, Any]) -> str:
    """Return the digest of a StatefulSet's template as it is wanted: the same for any number of replicas."""
    text = json.dumps(stateful_set["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_template(stateful_set: Object, template: Mapping[str, Any]) -> Object:
    """Return a StatefulSet with the template of a ControllerRevision."""
    kept = {key: value for key, value in template.items() if not key.startswith("$")}
    return signed({**stateful_set, "spec": {**stateful_set["spec"], "template": kept}})


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
