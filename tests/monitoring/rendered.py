# SPDX-License-Identifier: Apache-2.0
"""What the chart renders for monitoring, and promtool to judge it."""

import json
from pathlib import Path
from typing import Any

import yaml

from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import SYSTEM_NAMESPACE
from hack.toolchain.common import run
from hack.toolchain.tools import PROMETHEUS, TOOL_SETS, ensure_tools, tool_path

LIMIT = 60.0
RUNBOOKS = "https://docs.example.org/operate/runbooks/alerts"
VALUES: dict[str, Any] = {
    "crds": {"enabled": False},
    "metrics": {
        "service": True,
        "serviceMonitor": True,
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookUrl": RUNBOOKS + "/", "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
}


def ensure() -> None:
    """Build helm and promtool where they are missing."""
    ensure_tools([PROMETHEUS, *(tools for tools in TOOL_SETS if tools.name == "helm")])


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that helm renders; UserError with its message if it refuses the values."""
    argv: list[str | Path] = [tool_path("helm"), "template", "fresh", OPERATOR_CHART, "--namespace", SYSTEM_NAMESPACE]
    argv += ["--values", "-"]
    return [body for body in yaml.safe_load_all(run(argv, limit=LIMIT, stdin=json.dumps(values))) if body]


def one(objects: list[dict[str, Any]], kind: str) -> Any:  # noqa: ANN401 - a Kubernetes object
    """Return the only object of a kind; those of ServiceMonitor and the like are one each."""
    (found,) = [body for body in objects if body["kind"] == kind]
    return found


def write_rules(folder: Path) -> None:
    """Write the chart's rules into a folder, as rules.yaml."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(one(render(VALUES), "PrometheusRule")["spec"]))


def judge(folder: Path, name: str, tests: list[dict[str, Any]]) -> None:
    """Let promtool judge tests of the rules in a folder, every 15 s; UserError with what it says if one fails."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": tests}))
    assert "SUCCESS" in promtool(folder, "test", "rules", file.name)


def promtool(folder: Path, *words: str) -> str:
    """Run promtool in a folder; UserError with what it says if it fails."""
    return run([tool_path("promtool"), *words], limit=LIMIT, cwd=folder)
