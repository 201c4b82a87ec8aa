# SPDX-License-Identifier: Apache-2.0
"""The CRDs' and the chart's schemas, as a validator that also refuses unknown fields."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from tests.docs.pages import ROOT

GROUP = "poc.gonka.ai"
CHARTS = {"operator-values.yaml": "vllm-poc-operator"}


@cache
def _crds() -> dict[str, dict[str, Any]]:
    """Return the schema of each kind."""
    found = {}
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        (version,) = crd["spec"]["versions"]
        found[crd["spec"]["names"]["kind"]] = _closed(version["schema"]["openAPIV3Schema"])
    return found


def _closed(schema: Any) -> Any:  # noqa: ANN401 - any part of a JSON schema
    """Return the schema with unknown fields refused, as kubectl does, and without Kubernetes' own keywords."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def manifest_errors(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object of our kinds; empty if nothing is. CEL rules need a real API server."""
    kind = manifest["kind"]
    if kind not in _crds():
        return [f"there is no kind {kind}: {', '.join(_crds())}"]
    schema = dict(_crds()[kind])
    # The API server knows what metadata may contain; the CRD does not say it.
    schema["properties"] = {**schema["properties"], "metadata": {"type": "object", "required": ["name"]}}
    return [f"{'/'.join(map(str, e.instance_path))}: {e.message}" for e in _validator(schema).iter_errors(manifest)]


def values_errors(chart: str, values: dict[str, Any]) -> list[str]:
    """Return what the chart's schema says against these values over its defaults; empty if nothing."""
    folder = ROOT / "charts" / chart
    schema = json.loads((folder / "values.schema.json").read_text())
    merged = _merged(yaml.safe_load((folder / "values.yaml").read_text()), values)
    return [f"{'/'.join(map(str, e.instance_path))}: {e.message}" for e in _validator(schema).iter_errors(merged)]


def is_value(name: str) -> bool:
    """Tell whether the operator's chart takes a value, such as ``gateway.mlNodes[].name``."""
    part = json.loads((ROOT / "charts" / "vllm-poc-operator" / "values.schema.json").read_text())
    for key in name.split("."):
        properties = part.get("properties")
        if properties is None:  # a map of the user's own names
            return part.get("additionalProperties", True) is not False
        part = properties.get(key.removesuffix("[]"))
        if part is None:
            return False
        part = part.get("items", part) if key.endswith("[]") else part
    return True


def _merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults with the values put over them, as Helm does it."""
    result = dict(defaults)
    for key, value in values.items():
        inner = defaults.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _validator(schema: dict[str, Any]) -> Any:  # noqa: ANN401 - jsonschema_rs has one class for each draft
    return jsonschema_rs.validator_for(schema)


def example_files() -> list[Path]:
    """The manifests of docs/examples."""
    return sorted((ROOT / "docs" / "examples").glob("*.yaml"))
