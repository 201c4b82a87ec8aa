# SPDX-License-Identifier: Apache-2.0
"""The repository's YAML and what the chart renders, by the rules of yamllint; and the icon of the chart."""

import base64
import subprocess
from pathlib import Path

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from hack.deploy.local import OPERATOR_CHART
from hack.images.site import ROOT
from tests.chart.rendered import Values, ensure, text

#: What Helm renders has the values' own style; of it this must hold.
RENDERED = YamlLintConfig("rules: {key-duplicates: {forbid-duplicated-merge-keys: true}, octal-values: enable}")
#: A label in every place where a user may set labels: its key must not come twice.
LABELS = {"example.org/team": "a"}
FULL: Values = {
    "commonLabels": LABELS,
    "podLabels": LABELS,
    "gateway": {
        "networkPolicy": {"enabled": True},
        "archive": {"bucket": "results"},
        "ingress": {"enabled": True, "hosts": [{"host": "poc.example.org"}]},
    },
    "metrics": {
        "service": True,
        "serviceMonitor": True,
        "serviceMonitorLabels": LABELS,
        "podMonitor": {"enabled": True, "labels": LABELS},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://docs.example.org/alerts", "labels": LABELS},
        "dashboards": {"enabled": True, "labels": LABELS},
    },
    "watchNamespaces": ["poc", "default"],
}


def written() -> list[Path]:
    """Return the YAML files under version control."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.yaml", "*.yml"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()
    return [ROOT / name for name in names]


def test_all_yaml_follows_the_rules() -> None:
    config = YamlLintConfig(file=str(ROOT / ".yamllint.yaml"))
    files = [path for path in written() if not config.is_file_ignored(f"./{path.relative_to(ROOT)}")]
    assert OPERATOR_CHART / "values.yaml" in files
    assert not [path for path in files if "templates" in path.parts]
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in files
        for problem in linter.run(path.read_text(), config, str(path))
    ]
    assert found == []


@pytest.mark.parametrize("values", [{}, FULL], ids=["defaults", "full"])
def test_what_is_rendered_names_no_key_twice(values: Values) -> None:
    ensure()
    assert list(linter.run(text(values), RENDERED)) == []
    assert list(linter.run("a: 1\na: 2\n", RENDERED))


def test_the_icon_is_the_one_of_the_docs() -> None:
    icon = yaml.safe_load((OPERATOR_CHART / "Chart.yaml").read_text())["icon"]
    head, _, data = icon.partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (ROOT / "docs" / "images" / "icon.svg").read_bytes()
