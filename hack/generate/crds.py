# SPDX-License-Identifier: Apache-2.0
"""A CustomResourceDefinition from the models of one kind."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import yaml

from poc_operator.apis.v1alpha1.conditions import UNSEEN
from poc_operator.apis.v1alpha1.meta import GROUP, VERSION, Column, Kind, Resource
from poc_operator.apis.v1alpha1.schema import MUTABLE, VALIDATIONS, ApiModel
from poc_operator.apis.v1alpha1.work import WorkSpec

HEADER = "# SPDX-License-Identifier: Apache-2.0\n# Written by `make generate` from {source}: do not edit.\n"
_ORDER = ("type", "format", "description", "default", "enum")
_DROPPED = ("title", "$defs", MUTABLE)

Schema = dict[str, Any]


def render(kind: type[Resource], *, source: str) -> str:
    """Return the CRD as YAML; ``source`` names the module that it is made of."""
    text = yaml.safe_dump(crd(kind), sort_keys=False, width=120, allow_unicode=True)
    return HEADER.format(source=source) + text


def file_name(kind: type[Resource]) -> str:
    """Return the file's name, as controller-gen would call it."""
    return f"{GROUP}_{kind.KIND.plural}.yaml"


def crd(kind: type[Resource]) -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    names = kind.KIND
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": _subresources(names),
        "additionalPrinterColumns": [_column(column) for column in kind.COLUMNS],
        "schema": {"openAPIV3Schema": schema(kind)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names.plural}.{GROUP}",
            # Uninstalling the chart must not delete the users' objects with their results.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.kind,
                "listKind": f"{names.kind}List",
                "plural": names.plural,
                "singular": names.singular,
                "shortNames": [names.short],
                "categories": ["poc"],
            },
            "versions": [version],
        },
    }


def schema(kind: type[Resource]) -> Schema:
    """Return the kind's structural schema."""
    raw = raw_schema(kind)
    found = structural(raw, raw["$defs"])
    spec = found["properties"]["spec"]
    if is_work(kind):
        changeable = ", ".join(sorted(mutable_fields(kind)))
        spec["description"] += f" It is fixed once the object exists, except {changeable}."
    unseen = UNSEEN.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
        "status": _ordered({**_as_status(found["properties"]["status"]), "default": {"conditions": [unseen]}}),
    }
    rules = {VALIDATIONS: [kind.KIND.name_rule.to_json()]} if kind.KIND.name_rule is not None else {}
    head = {"type": "object", "description": found["description"], "required": ["spec"]}
    return {**head, "properties": properties, **rules}


def _subresources(names: Kind) -> Schema:
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return {"status": {}, "scale": scale} if names.scale else {"status": {}}


def is_work(kind: type[Resource]) -> bool:
    """Whether the kind asks pods to work; the spec of work is fixed once the object exists."""
    return issubclass(spec_model(kind), WorkSpec)


def _as_status(schema: Schema, keys: Sequence[str] = ()) -> Schema:
    """Return the schema of a status, or of a part of it, with no defaults of fields and only ``keys`` required.

    Defaults would be stored: a thousand slots would no longer fit. What an operator of another version leaves out must
    not make its status invalid.
    """
    kept = {key: value for key, value in schema.items() if key not in {"default", "required"}}
    if keys:
        kept["required"] = list(keys)
    if "properties" in kept:
        kept["properties"] = {name: _as_status(value) for name, value in kept["properties"].items()}
    if "items" in kept:
        kept["items"] = _as_status(kept["items"], kept.get("x-kubernetes-list-map-keys", ()))
    return _ordered(kept)


def raw_schema(kind: type[Resource]) -> Schema:
    """Return the JSON schema that pydantic makes of the models, with references and the generator's own marks."""
    return kind.model_json_schema(by_alias=True)


def spec_model(kind: type[Resource]) -> type[ApiModel]:
    """Return the model of the kind's spec."""
    return cast(type[ApiModel], kind.model_fields["spec"].annotation)


def mutable_fields(kind: type[Resource]) -> set[str]:
    """Return the names of the spec's fields that may be changed."""
    raw = raw_schema(kind)
    properties = raw["$defs"][spec_model(kind).__name__]["properties"]
    return {
        name
        for name, field in properties.items()
        if MUTABLE in field or any(MUTABLE in o for o in field.get("anyOf", ()))
    }


def structural(raw: Mapping[str, Any], definitions: Mapping[str, Schema]) -> Schema:
    """Return a schema as apiextensions wants it: without references, unions with null, and titles."""
    merged = _resolved(raw, definitions)
    kept = {key: value for key, value in merged.items() if key not in _DROPPED}
    if "const" in kept:
        kept["enum"] = [kept.pop("const")]
    if "description" in kept:
        kept["description"] = " ".join(inspect.cleandoc(kept["description"]).split())
    if "properties" in kept:
        kept["properties"] = {name: structural(value, definitions) for name, value in kept["properties"].items()}
    if "items" in kept:
        kept["items"] = structural(kept["items"], definitions)
        kept.setdefault("x-kubernetes-list-type", "atomic")
    if isinstance(kept.get("additionalProperties"), Mapping):
        kept["additionalProperties"] = structural(kept["additionalProperties"], definitions)
    return _ordered(_with_short_default(kept))


def _resolved(raw: Mapping[str, Any], definitions: Mapping[str, Schema]) -> Schema:
    """Return the schema with what it refers to put in place; its own description wins, rules add up."""
    own = dict(raw)
    parts: list[Schema] = []
    if reference := own.pop("$ref", None):
        parts.append(_resolved(definitions[reference.rpartition("/")[2]], definitions))
    for union in ("anyOf", "allOf"):
        options = [option for option in own.pop(union, ()) if option.get("type") != "null"]
        parts.extend(_resolved(option, definitions) for option in options)
    merged: Schema = {}
    for part in (*parts, own):
        rules = [*merged.get(VALIDATIONS, ()), *part.get(VALIDATIONS, ())]
        merged |= part | ({VALIDATIONS: rules} if rules else {})
    return merged


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Drop fields that are null, at any depth: the API server takes them for values of the wrong type."""
    if not isinstance(value, Mapping):
        return value
    return {name: _without_nulls(field) for name, field in value.items() if field is not None}


def _with_short_default(schema: Schema) -> Schema:
    """Drop a default of null, and what a default of an object repeats of its fields' own defaults."""
    if "default" not in schema:
        return schema
    default = _without_nulls(schema.pop("default"))
    if isinstance(default, Mapping):
        fields = schema.get("properties", {})
        default = {name: value for name, value in default.items() if value != fields.get(name, {}).get("default")}
    return schema if default is None else {**schema, "default": default}


def _ordered(schema: Schema) -> Schema:
    first: Schema = {key: schema[key] for key in _ORDER if key in schema}
    last: Schema = {key: schema[key] for key in ("properties", "items", "additionalProperties") if key in schema}
    return {**first, **{key: value for key, value in schema.items() if key not in {*first, *last}}, **last}


def _column(column: Column) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": column.name,
        "type": column.type,
        "jsonPath": column.json_path,
        "description": column.description,
    }
    return {**found, "priority": 1} if column.wide else found
