# SPDX-License-Identifier: Apache-2.0
"""Objects as plain JSON: a strategic merge patch put over one, a volume taken out, and whether one covers another.

Lists whose items have a key, such as containers by their names, are merged item by item; others replace. Kubernetes has
the keys in its types, and `_KEYS` those that a pod's template can have.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Json = Any

#: Key of the items of a list, by the list's name.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "protocol"),
    "ownerReferences": ("uid",),
}
_DEFAULTS = {"protocol": "TCP"}
_DIRECTIVE = "$patch"


class PatchError(ValueError):
    """A patch that does not fit what it patches; the message names the field."""


def merged(base: Json, patch: Json, path: str) -> Json:
    """Return ``base`` with the strategic merge patch put over it. PatchError if it does not fit.

    Null removes a field, ``$patch: replace`` lets an object replace what there is, and ``$patch: delete`` removes an
    item of a list with keys.
    """
    if isinstance(base, Mapping):
        return _merged_object(base, _of(Mapping, patch, path), path)
    return patch


def _of(kind: type, value: Json, path: str) -> Json:
    if not isinstance(value, kind):
        raise PatchError(f"{path} must be {'an object' if kind is Mapping else 'a list'}, not {_shown(value)}")
    return value


def _shown(value: Json) -> str:
    return repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}…"  # noqa: PLR2004


def _merged_object(base: Mapping[str, Json], patch: Mapping[str, Json], path: str) -> dict[str, Json]:
    directive = patch.get(_DIRECTIVE)
    given = {name: value for name, value in patch.items() if name != _DIRECTIVE}
    if directive == "replace":
        return given
    if directive is not None:
        raise PatchError(f'{path}.{_DIRECTIVE} must be "replace", not {_shown(directive)}')
    found = {name: value for name, value in base.items() if name not in given}
    for name, value in given.items():
        if value is None:
            continue
        if name in _KEYS:
            found[name] = _merged_list(name, base.get(name) or [], value, f"{path}.{name}")
        else:
            found[name] = merged(base[name], value, f"{path}.{name}") if name in base else value
    return found


def _merged_list(name: str, base: Sequence[Json], patch: Json, path: str) -> list[Json]:
    items = _of(Sequence, patch, path) if not isinstance(patch, str) else _of(list, patch, path)
    found = {_identity(name, item, path): item for item in base}
    for index, item in enumerate(items):
        where = f"{path}[{index}]"
        key = _identity(name, _of(Mapping, item, where), where)
        if item.get(_DIRECTIVE) == "delete":
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key, {}), item, where)
    return list(found.values())


def _identity(name: str, item: Mapping[str, Json], path: str) -> tuple[Json, ...]:
    keys = _KEYS[name]
    if keys[0] not in item or not isinstance(item[keys[0]], str | int):
        raise PatchError(f"{path} must have a {keys[0]}, by which items are told apart")
    return _key_of(name, item)


def _key_of(name: str, item: Mapping[str, Json]) -> tuple[Json, ...]:
    return tuple(item.get(key, _DEFAULTS.get(key)) for key in _KEYS[name])


def without_volume(pod: Mapping[str, Json], name: str) -> dict[str, Json]:
    """Return a pod's spec without a volume, and without its mounts."""
    found = dict(pod)
    if "volumes" in pod:
        found["volumes"] = [one for one in pod["volumes"] if one.get("name") != name]
    for kind in ("containers", "initContainers"):
        if kind in pod:
            found[kind] = [_without_mounts(container, name) for container in pod[kind]]
    return found


def _without_mounts(container: Mapping[str, Json], volume: str) -> dict[str, Json]:
    mounts = container.get("volumeMounts")
    return dict(container) | (
        {} if mounts is None else {"volumeMounts": [one for one in mounts if one.get("name") != volume]}
    )


def covers(found: Json, wanted: Json, name: str = "") -> bool:
    """Whether an object, as the API server has it, has all that is wanted. What it has beside that does not matter."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(covers(found.get(key), item, key) for key, item in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return isinstance(found, Sequence) and not isinstance(found, str) and _covers_list(found, wanted, name)
    return bool(found == wanted)


def _covers_list(found: Sequence[Json], wanted: Sequence[Json], name: str) -> bool:
    keys = _KEYS.get(name)
    if keys is None or not all(isinstance(item, Mapping) and keys[0] in item for item in (*found, *wanted)):
        return len(found) == len(wanted) and all(covers(*pair) for pair in zip(found, wanted, strict=True))
    there = {_key_of(name, item): item for item in found}
    return all(covers(there.get(_key_of(name, item)), item) for item in wanted)
