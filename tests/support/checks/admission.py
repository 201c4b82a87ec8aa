# SPDX-License-Identifier: Apache-2.0
"""What the API server does with an object of a CRD, offline: prune, fill in defaults, check bounds, evaluate CEL.

``tests/cluster/test_schema.py`` compares its verdicts with a real API server's.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from hack.generate.crds import Schema, schema
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.schema import PRESERVED

_TYPES: Mapping[str, type] = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


@cache
def spec_schema(kind: type[Resource]) -> Schema:
    """Return the schema of the kind's spec."""
    found: Schema = schema(kind)["properties"]["spec"]
    return found


def defaulted(value: Any, schema: Schema) -> Any:  # noqa: ANN401 - JSON
    """Return the value without fields that the schema does not know, and with its defaults."""
    if isinstance(value, list):
        return [defaulted(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    found = {}
    for name, child in schema["properties"].items():
        given = value.get(name, child.get("default"))
        if given is not None:
            found[name] = defaulted(given, child)
    return found


def flaws(value: Any, schema: Schema, path: str = "spec") -> list[str]:  # noqa: ANN401 - JSON
    """Return what is wrong with a value that has its defaults; nothing, if the API server would store it."""
    if not _is_of(value, schema["type"]):
        return [f"{path}: must be of type {schema['type']}"]
    own = [*_bounds(value, schema, path), *_parts(value, schema, path)]
    return own or list(_broken_rules(value, schema, path))


def _is_of(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _bounds(value: Any, schema: Schema, path: str) -> Iterator[str]:  # noqa: ANN401 - JSON
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: not one of {schema['enum']}"
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{path}: out of range"
    sizes: dict[type, tuple[str, str]] = {
        str: ("minLength", "maxLength"),
        list: ("minItems", "maxItems"),
        dict: ("minProperties", "maxProperties"),
    }
    low, high = sizes.get(type(value), ("", ""))
    if low and not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
        yield f"{path}: has a wrong size"
    yield from (f"{path}.{name}: is required" for name in schema.get("required", ()) if name not in value)
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys and len({tuple(item.get(key) for key in keys) for item in value}) < len(value):
        yield f"{path}: has a duplicate"


def _parts(value: Any, schema: Schema, path: str) -> Iterator[str]:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from flaws(item, schema["items"], f"{path}[{index}]")
    elif isinstance(value, dict) and PRESERVED not in schema:
        for name, item in value.items():
            child = schema.get("properties", {}).get(name) or schema["additionalProperties"]
            yield from flaws(item, child, f"{path}.{name}")


def _broken_rules(value: Any, schema: Schema, path: str) -> Iterator[str]:  # noqa: ANN401 - JSON
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"]:
            continue  # about changes only
        held = _compiled(rule["rule"]).eval(data={"self": value}).value()
        if held is not True:
            yield f"{path}: {rule['message']}" + ("" if held is False else f" ({held})")


@cache
def _compiled(rule: str) -> Any:  # noqa: ANN401 - the library has no types
    return _environment().compile(rule)


@cache
def _environment() -> Any:  # noqa: ANN401 - the library has no types
    is_ip = cel.Overload("is_ip", return_type=cel.Type.BOOL, parameters=[cel.Type.STRING], impl=_is_ip)
    return cel.NewEnv(
        variables={"self": cel.Type.DYN},
        extensions=[ext_strings.ExtStrings()],
        functions=[cel.FunctionDecl("isIP", [is_ip])],
    )


def _is_ip(text: str) -> bool:
    """Whether the API server takes the text for an address: it knows neither zones nor IPv4 within IPv6."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text and getattr(address, "ipv4_mapped", None) is None


def admitted(kind: type[Resource], spec: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the spec as it would be stored, and why it would not be."""
    wanted = spec_schema(kind)
    stored: dict[str, Any] = defaulted(dict(spec), wanted)
    return stored, flaws(stored, wanted)
