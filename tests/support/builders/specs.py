# SPDX-License-Identifier: Apache-2.0
"""Specs of every kind, made from its schema: the edges of every bound, and random ones that the schema accepts."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from hypothesis import strategies as st

from hack.generate.crds import Schema
from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from tests.support.checks.admission import spec_schema

Spec = dict[str, Any]
Json = Any

_COMMON: Spec = {
    "blockHash": "5f" * 32,
    "blockHeight": 7,
    "publicKey": "02a1",
    "model": {"name": "demo", "seqLen": 64},
    "selector": {
        "matchLabels": {"poc.gonka.ai/worker": "true"},
        "matchExpressions": [{"key": "tier", "operator": "In", "values": ["a", "b"]}],
    },
    "activeDeadlineSeconds": 600,
    "ttlSecondsAfterFinished": 60,
}
_ROUND: Spec = {
    **_COMMON,
    "nodes": {"first": 0, "last": 1, "count": 3, "groups": 2},
    "callbackURL": "http://collector.example.org:8080/poc",
    "callbackSecretRef": {"name": "collector"},
    "crossCheck": {"maxDifference": "0.2"},
}
_CONFIG_MAP = {"configMap": {"name": "claims", "key": "proofs.json"}}
_SAMPLE = {"round": {"name": "demo", "nonces": 200, "seed": "x"}}
_TEST = {"distThreshold": "0.4", "pMismatch": "0.1", "pValueThreshold": "0.05"}

#: Specs in which, taken together, every field is set.
FULL: Mapping[type[Resource], tuple[Spec, ...]] = {
    PoCRound: (
        {**_ROUND, "rTarget": "1.405", "stop": {"afterValid": 100}},
        {**_ROUND, "artifact": {"kDim": 12}, "stop": {"afterNonces": 100}},
        {**_ROUND, "rTarget": "1.405", "stop": {"afterSeconds": 30}},
    ),
    PoCValidation: (
        {**_COMMON, "rTarget": "1.4", "proofs": {"inline": [{"nonce": 1, "distance": "1.3"}]}},
        {**_COMMON, "artifact": {}, "proofs": {"inline": [{"nonce": 1, "vector": "AAAA"}]}, "statTest": _TEST},
        {**_COMMON, "artifact": {}, "proofs": _CONFIG_MAP},
        {**_COMMON, "artifact": {}, "proofs": _SAMPLE},
    ),
    PoCCalibration: ({**_COMMON, "validRate": "0.1", "nonces": 2000},),
}


def edges(kind: type[Resource]) -> Iterator[tuple[str, Spec]]:
    """Yield a name and a spec for each bound of each field: at the bound, and just beyond it."""
    for number, full in enumerate(FULL[kind]):
        for path, value in _edges(full, spec_schema(kind), ()):
            yield f"{number} {'.'.join(map(str, path))}={str(value)[:40]}", _changed(full, path, value)


def _edges(value: Json, schema: Schema, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Json]]:
    yield from ((path, edge) for edge in _edges_of(value, schema))
    if isinstance(value, list):
        yield from _edges(value[0], schema["items"], (*path, 0))
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            inner = value.get(name, child.get("default"))
            if inner is not None:
                yield from _edges(inner, child, (*path, name))


def _edges_of(value: Json, schema: Schema) -> Iterator[Json]:
    if "enum" in schema:
        yield from (*schema["enum"], "Unknown")
    elif schema["type"] == "integer":
        yield from (schema["minimum"] - 1, schema["minimum"], schema["maximum"], schema["maximum"] + 1)
    elif schema["type"] == "string":
        yield ""
        yield from (start + fill * (size - len(start)) for size in _sizes(schema) for start, fill in _FILLS)
    elif schema["type"] == "array":
        numbered = [{**value[0], "nonce": index} if "nonce" in value[0] else value[0] for index in range(500)]
        yield from (numbered[:size] for size in (0, schema["maxItems"], schema["maxItems"] + 1))
    elif "maxProperties" in schema:
        yield from ({f"k{index}": "v" for index in range(schema["maxProperties"] + more)} for more in (0, 1))


#: Ways to fill a text of any length, so that for each grammar one of them fits.
_FILLS = (("", "a"), ("", "1"), ("0.", "1"), ("1.", "0"), ("http://h/", "x"))


def _sizes(schema: Schema) -> tuple[int, int]:
    return schema["maxLength"], schema["maxLength"] + 1


def _changed(spec: Spec, path: tuple[str | int, ...], value: Json) -> Spec:
    changed = copy.deepcopy(spec)
    place: Json = changed
    for key in path[:-1]:
        place = place[key] if isinstance(key, int) else place.setdefault(key, {})
    place[path[-1]] = value
    return changed


@cache
def specs(kind: type[Resource]) -> st.SearchStrategy[Spec]:
    """Return random specs, most of which the schema accepts: rules that couple fields are kept."""
    return _objects(spec_schema(kind), "spec").flatmap(_COUPLED[kind])


def _values(schema: Schema, path: str) -> st.SearchStrategy[Json]:
    found: st.SearchStrategy[Json]
    if path in _OWN:
        return _OWN[path]
    match schema["type"]:
        case _ if "enum" in schema:
            found = st.sampled_from(schema["enum"])
        case "integer":
            low, high = schema["minimum"], schema["maximum"]
            found = st.sampled_from([low, low + 1, high - 1, high]) | st.integers(low, high)
        case "boolean":
            found = st.booleans()
        case "string":
            found = _texts(schema)
        case "array":
            found = st.lists(_values(schema["items"], f"{path}[]"), min_size=schema.get("minItems", 0), max_size=5)
        case _:
            found = _objects(schema, path)
    return found


def _objects(schema: Schema, path: str) -> st.SearchStrategy[Spec]:
    children = {name: _values(child, f"{path}.{name}") for name, child in schema["properties"].items()}
    required = {name: children.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=children)


_MATCHES = re.compile(r"^self\.matches\('\^\(\?:(.*)\)\$'\)$")


def _texts(schema: Schema) -> st.SearchStrategy[str]:
    rules = (_MATCHES.match(rule["rule"]) for rule in schema.get("x-kubernetes-validations", ()))
    patterns = [re.sub(r"\\(.)", r"\1", found[1]) for found in rules if found]
    low, high = schema.get("minLength", 0), schema["maxLength"]
    if not patterns:
        return st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=low, max_size=min(high, 50))
    return st.from_regex(patterns[0], fullmatch=True).filter(lambda text: low <= len(text) <= high)


def _label_values() -> st.SearchStrategy[str]:
    return st.from_regex("[A-Za-z0-9]([-A-Za-z0-9_.]{0,9}[A-Za-z0-9])?", fullmatch=True)


_KEYS = st.from_regex(
    "([a-z0-9]([-a-z0-9]{0,5}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,9}[A-Za-z0-9])?", fullmatch=True
)


@st.composite
def _nodes(draw: st.DrawFn) -> Spec:
    count = draw(st.sampled_from([1, 2, 100_000]) | st.integers(1, 100_000))
    first = draw(st.integers(0, count - 1))
    served = draw(st.integers(1, 4))
    last = min(count, first + served) - 1
    groups = draw(st.none() | st.sampled_from([1, 2, 64]))
    return {"first": first, "last": last, "count": count} | ({} if groups is None else {"groups": groups})


@st.composite
def _selector(draw: st.DrawFn) -> Spec:
    labels = draw(st.dictionaries(_KEYS, st.just("") | _label_values(), max_size=3))
    with_values = {
        "operator": st.sampled_from(["In", "NotIn"]),
        "values": st.lists(_label_values(), min_size=1, max_size=3),
    }
    without = {"operator": st.sampled_from(["Exists", "DoesNotExist"])}
    requirement = st.fixed_dictionaries({"key": _KEYS, **with_values}) | st.fixed_dictionaries(
        {"key": _KEYS, **without}
    )
    expressions = draw(st.lists(requirement, min_size=0 if labels else 1, max_size=3))
    return {"matchLabels": labels, "matchExpressions": expressions}


def _urls() -> st.SearchStrategy[str]:
    hosts = st.sampled_from(["h", "a-b.c1.example.org", "H.x", "10.0.0.255", "[::1]", "[fd00:a::1]", f"{'a' * 63}.b"])
    ports = st.just("") | st.integers(1, 65_535).map(":{}".format)
    paths = st.from_regex("(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}){0,9}){0,3}", fullmatch=True)
    return st.builds("{}://{}{}{}".format, st.sampled_from(["http", "https"]), hosts, ports, paths)


def _one_of_fields(fields: Mapping[str, st.SearchStrategy[Json]]) -> st.SearchStrategy[Spec]:
    return st.one_of([st.fixed_dictionaries({name: value}) for name, value in fields.items()])


_COUNTS = st.integers(1, 2**31 - 1)
#: Objects whose fields depend on each other.
_OWN: dict[str, st.SearchStrategy[Json]] = {
    "spec.nodes": _nodes(),
    "spec.selector": _selector(),
    "spec.callbackURL": _urls(),
    "spec.stop": _one_of_fields(
        {"afterSeconds": st.integers(1, 31_536_000), "afterNonces": _COUNTS, "afterValid": _COUNTS}
    ),
}


def _with_protocol(spec: Spec) -> st.SearchStrategy[Spec]:
    """Keep one protocol, and what fits to it."""
    distance = {name: value for name, value in spec.items() if name != "artifact"}
    distance |= {"rTarget": spec.get("rTarget", "1.4"), "model": {**spec["model"], "strongRng": False}}
    artifact = {name: value for name, value in spec.items() if name != "rTarget"}
    artifact |= {"artifact": spec.get("artifact", {})}
    if "afterValid" in artifact.get("stop", {}):
        del artifact["stop"]
    if "statTest" in distance:
        distance["statTest"] = {name: value for name, value in distance["statTest"].items() if name != "distThreshold"}
    return st.sampled_from([distance, artifact])


def _with_proofs(spec: Spec) -> st.SearchStrategy[Spec]:
    """Keep one source of proofs, each of the spec's protocol."""
    field = "vector" if "artifact" in spec else "distance"
    nonces = st.lists(
        st.sampled_from([0, 2**31 - 1]) | st.integers(0, 2**31 - 1), min_size=1, max_size=200, unique=True
    )
    inline = nonces.map(lambda found: {"inline": [{"nonce": nonce, field: "1.3"} for nonce in found]})
    return (inline | st.sampled_from([_CONFIG_MAP, _SAMPLE])).map(lambda proofs: {**spec, "proofs": proofs})


def _with_receiver(spec: Spec) -> Spec:
    """Keep the receiver's Secret only beside its address."""
    return (
        spec if "callbackURL" in spec else {name: value for name, value in spec.items() if name != "callbackSecretRef"}
    )


_COUPLED: Mapping[type[Resource], Callable[[Spec], st.SearchStrategy[Spec]]] = {
    PoCRound: lambda spec: _with_protocol(_with_receiver(spec)),
    PoCValidation: lambda spec: _with_protocol(spec).flatmap(_with_proofs),
    PoCCalibration: st.just,
}
