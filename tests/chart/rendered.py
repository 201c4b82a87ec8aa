# SPDX-License-Identifier: Apache-2.0
"""What the real helm renders of the operator's chart, without a cluster."""

import json
from pathlib import Path
from typing import Any

import yaml

from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import SYSTEM_NAMESPACE
from hack.toolchain.common import run
from hack.toolchain.tools import TOOL_SETS, ensure_tools, tool_path

Values = dict[str, Any]
LIMIT = 30.0
RELEASE = "fresh"
#: The kinds that make pods, with the place of the pod's spec.
POD_SPECS = {"Deployment": ("spec", "template", "spec"), "Job": ("spec", "template", "spec"), "Pod": ("spec",)}


def ensure() -> None:
    """Build helm where it is missing."""
    ensure_tools([tools for tools in TOOL_SETS if tools.name == "helm"])


def merged(defaults: Values, values: Values) -> Values:
    """Return the defaults with the values put over them, as Helm does it."""
    result = dict(defaults)
    for key, value in values.items():
        inner = defaults.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def nested(path: str, value: object) -> Values:
    """Return values in which alone this path, with dots, is set."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def text(values: Values | Path, *, namespace: str = SYSTEM_NAMESPACE) -> str:
    """Return what helm prints for values, or a file of them; UserError with its message if it refuses them."""
    argv: list[str | Path] = [tool_path("helm"), "template", RELEASE, OPERATOR_CHART, "--namespace", namespace]
    if isinstance(values, Path):
        return run([*argv, "--values", values], limit=LIMIT)
    return run([*argv, "--values", "-"], limit=LIMIT, stdin=json.dumps(values))


def objects(values: Values | Path, *, namespace: str = SYSTEM_NAMESPACE) -> list[dict[str, Any]]:
    """Return the rendered objects."""
    return [body for body in yaml.safe_load_all(text(values, namespace=namespace)) if body]


def pods(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spec of each pod that these objects make, by the object's kind and name."""
    specs: dict[str, Any] = {}
    for body in found:
        spec: Any = body
        for name in POD_SPECS.get(body["kind"], ()):
            spec = spec[name]
        if body["kind"] in POD_SPECS:
            specs[f"{body['kind']}/{body['metadata']['name']}"] = spec
    return specs
