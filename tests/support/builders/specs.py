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
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_pod import MAX_GPUS, own_flag
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


def _without(spec: Spec, field: str) -> Spec:
    return {name: value for name, value in spec.items() if name != field}


def _without_selector(spec: Spec) -> Spec:
    """Return the spec with a fleet instead of a selector."""
    return _without(spec, "selector") | {"fleetRef": {"name": "demo"}}


_CONFIG_MAP = {"configMap": {"name": "claims", "key": "proofs.json"}}
_SAMPLE = {"round": {"name": "demo", "nonces": 200, "seed": "x"}}
_TEST = {"distThreshold": "0.4", "pMismatch": "0.1", "pValueThreshold": "0.05"}

_LABELS = {"labels": {"tier": "a"}, "annotations": {"example.org/why": "tests"}}
_FLEET: Spec = {
    "servedName": "demo",
    "image": "registry.example.org/vllm-poc-worker:1",
    "imagePullSecrets": [{"name": "registry"}],
    "engineArgs": ["--max-model-len=8192"],
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "huggingFace": {"tokenSecret": "hub"},
    "auth": {"open": True},
    "callbackAllow": ["*.example.org"],
    "host": "0.0.0.0",
    "resources": {"requests": {"cpu": "4", "memory": "64Gi"}, "limits": {"memory": "96Gi"}},
    "priorityClassName": "gpu",
    "spread": {},
    "selfCheck": {"nonces": 8, "seqLen": 256, "kDim": 12, "statTest": _TEST},
    "metrics": {"podMonitor": True, "labels": {"release": "prometheus"}},
    "podTemplate": {"metadata": _LABELS, "spec": {"tolerations": [{"operator": "Exists"}]}},
}

#: Specs in which, taken together, every field is set.
FULL: Mapping[type[Resource], tuple[Spec, ...]] = {
    PoCRound: (
        {**_ROUND, "rTarget": "1.405", "stop": {"afterValid": 100}},
        {**_ROUND, "artifact": {"kDim": 12}, "stop": {"afterNonces": 100}},
        {**_without(_ROUND, "crossCheck"), "decode": {"maxTokens": 256}, "stop": {"afterNonces": 100}},
        {**_without_selector(_ROUND), "rTarget": "1.405", "stop": {"afterSeconds": 30}},
    ),
    PoCValidation: (
        {**_COMMON, "rTarget": "1.4", "proofs": {"inline": [{"nonce": 1, "distance": "1.3"}]}},
        {**_COMMON, "artifact": {}, "proofs": {"inline": [{"nonce": 1, "vector": "AAAA"}]}, "statTest": _TEST},
        {**_COMMON, "artifact": {}, "proofs": _CONFIG_MAP},
        {**_COMMON, "decode": {"maxTokens": 2}, "proofs": {"inline": [{"nonce": 1, "chain": "AQID"}]}},
        {**_COMMON, "artifact": {}, "proofs": _SAMPLE},
    ),
    PoCCalibration: ({**_COMMON, "validRate": "0.1", "nonces": 2000},),
    PoCFleet: (
        {
            **_FLEET,
            "model": {"preset": "minimax-m2.7"},
            "gpu": {"product": "NVIDIA-H200", "count": 2},
            "decode": {"codebook": {"configMap": "codebook"}},
        },
        {**_FLEET, "model": {"path": "org/model"}, "cache": {"existingClaim": "weights"}},
        {
            **_FLEET,
            "model": {"path": "org/model"},
            "gpu": {"count": 2},
            "parallelism": {"tensor": 2, "pipeline": 1},
            "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a.b"}}}],
            "cache": {"size": "400Gi", "storageClass": "nfs", "accessMode": "ReadWriteMany", "download": True},
            "decode": {"codebook": {"path": "/cache/sphere_codebook.pt"}, "reserve": "5Gi"},
        },
    ),
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
        key = next((key for key in ("nonce", "name") if key in value[0]), None) if isinstance(value[0], dict) else None
        numbered = [{**value[0], key: _numbered(key, index)} if key else value[0] for index in range(500)]
        yield from (numbered[:size] for size in (0, schema["maxItems"], schema["maxItems"] + 1))
    elif "maxProperties" in schema:
        yield from ({f"k{index}": "v" for index in range(schema["maxProperties"] + more)} for more in (0, 1))


def _numbered(key: str, index: int) -> Json:
    return index if key == "nonce" else f"n{index}"


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
    return _objects(spec_schema(kind), "spec").map(_with_pods).flatmap(_COUPLED[kind])


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
    neutral = {name: value for name, value in spec.items() if name not in {"rTarget", "artifact", "decode"}}
    without_valid = _without(neutral, "stop") if "afterValid" in neutral.get("stop", {}) else neutral
    test = {"statTest": _without(neutral["statTest"], "distThreshold")} if "statTest" in neutral else {}
    model = {**spec["model"], "strongRng": False}
    distance = neutral | test | {"rTarget": spec.get("rTarget", "1.4"), "model": model}
    artifact = without_valid | {"artifact": spec.get("artifact", {})}
    decode = _without(without_valid, "crossCheck") | test | {"decode": spec.get("decode", {"maxTokens": 256})}
    return st.sampled_from([distance, artifact, decode])


def _with_proofs(spec: Spec) -> st.SearchStrategy[Spec]:
    """Keep one source of proofs, each of the spec's protocol."""
    fields = {"artifact": "vector", "decode": "chain", "rTarget": "distance"}
    field = next(fields[name] for name in fields if name in spec)
    nonces = st.lists(
        st.sampled_from([0, 2**31 - 1]) | st.integers(0, 2**31 - 1), min_size=1, max_size=200, unique=True
    )
    inline = nonces.map(lambda found: {"inline": [{"nonce": nonce, field: "1.3"} for nonce in found]})
    return (inline | st.sampled_from([_CONFIG_MAP, _SAMPLE])).map(lambda proofs: {**spec, "proofs": proofs})


def _with_pods(spec: Spec) -> Spec:
    """Keep one of fleet and selector, and the port only beside the latter."""
    if "fleetRef" not in spec:
        return spec
    return {name: value for name, value in spec.items() if name not in {"selector", "port"}}


def _with_receiver(spec: Spec) -> Spec:
    """Keep the receiver's Secret only beside its address."""
    return (
        spec if "callbackURL" in spec else {name: value for name, value in spec.items() if name != "callbackSecretRef"}
    )


@st.composite
def _coupled_fleet(draw: st.DrawFn, spec: Spec) -> Spec:
    """Keep one source of the model, of each variable and of the cache, as many ranks as there are GPUs, and few numbers
    in the vectors of a self-check."""
    if "kDim" in spec.get("selfCheck", {}):
        spec = {**spec, "selfCheck": {**spec["selfCheck"], "nonces": 8}}
    if "decode" in spec:
        spec = {**spec, "decode": draw(_DECODES)}
    preset = {**spec, "model": {"preset": draw(st.sampled_from(["minimax-m2.7", "glm-5.3-flash", "unknown"]))}}
    preset.pop("parallelism", None)
    gpus = draw(st.sampled_from([1, 2, MAX_GPUS]))
    ranks = draw(st.sampled_from([{"tensor": gpus}, {"tensor": 1, "pipeline": gpus}, None]))
    path = {**spec, "model": {"path": "org/model"}, "gpu": {**spec.get("gpu", {}), "count": gpus}}
    path = {**path, "parallelism": ranks} if ranks else {key: path[key] for key in path if key != "parallelism"}
    if "pipeline" in (ranks or {}):
        path.pop("decode", None)
    found: Spec = draw(st.sampled_from([preset, path]))
    return found | {"callbackAllow": spec.get("callbackAllow") or ["*"]}


def _env() -> st.SearchStrategy[Json]:
    texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9)
    sources = st.fixed_dictionaries({"value": texts})
    reference = st.just({"valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}})
    names = st.lists(st.from_regex("X_[A-Za-z0-9_]{0,9}", fullmatch=True), max_size=4, unique=True)
    return names.flatmap(
        lambda found: st.tuples(*(sources | reference for _ in found)).map(
            lambda values: [{"name": name, **value} for name, value in zip(found, values, strict=True)]
        )
    )


_QUANTITIES = st.dictionaries(
    st.sampled_from(["cpu", "memory", "example.org/nic"]), st.from_regex("[1-9][0-9]{0,3}(m|Gi|)", fullmatch=True)
)
_CACHES = st.sampled_from(
    [
        {},
        {"existingClaim": "weights"},
        {"size": "2Ti"},
        {"size": "400Gi", "storageClass": "nfs"},
        {"size": "1Gi", "download": True},
    ]
)
_DECODES = st.sampled_from(
    [
        {"codebook": {"configMap": "codebook"}, "reserve": "5Gi"},
        {"codebook": {"path": "/a"}, "reserve": "512Mi"},
        {"rebuildCodebook": True, "reserve": "99999Gi"},
    ]
)
_FLAGS = st.from_regex('--?[a-z][-a-z_=0-9{}" ]{0,20}', fullmatch=True).filter(lambda text: not own_flag(text))
_TEMPLATES: list[Json] = [
    {},
    {"metadata": _LABELS},
    {"spec": {"containers": [{"name": "vllm", "command": ["sleep"]}, {"name": "sidecar", "image": "x"}]}},
    {"spec": {"tolerations": None, "volumes": [{"name": "cache", "emptyDir": None, "hostPath": {"path": "/a"}}]}},
    {"spec": {"containers": "text"}},
    {"spec": {"volumes": [1, {"name": 2}]}},
]
_OWN |= {
    "spec.env": _env(),
    "spec.engineArgs": st.lists(_FLAGS, max_size=4),
    "spec.resources": st.fixed_dictionaries({}, optional={"requests": _QUANTITIES, "limits": _QUANTITIES}),
    "spec.cache": _CACHES,
    "spec.metrics": st.sampled_from([{}, {"podMonitor": True}, {"podMonitor": True, "labels": _LABELS["labels"]}]),
    "spec.podTemplate": st.sampled_from(_TEMPLATES),
    "spec.imagePullSecrets": st.just([{"name": "a"}, {"name": "b"}]),
}


_COUPLED: Mapping[type[Resource], Callable[[Spec], st.SearchStrategy[Spec]]] = {
    PoCRound: lambda spec: _with_protocol(_with_receiver(spec)),
    PoCValidation: lambda spec: _with_protocol(spec).flatmap(_with_proofs),
    PoCCalibration: st.just,
    PoCFleet: _coupled_fleet,
}
