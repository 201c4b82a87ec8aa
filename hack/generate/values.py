# SPDX-License-Identifier: Apache-2.0
"""The reference of a chart's values, from the comments of values.yaml and the types of values.schema.json.

The same table stands in the chart's own README, which registries show.

A comment that begins with ``# --`` describes the key below it; other comments are for readers of the file alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_NOTE = "<!-- Written by `make generate` from {source}: do not edit. -->"
_MARK = "# --"


class UndescribedValueError(Exception):
    """A value that neither it nor what it is part of has a comment."""


def render(chart: Path) -> str:
    """Return the page in Markdown for the chart in this folder."""
    head = (
        _NOTE.format(source=f"charts/{chart.name}/values.yaml"),
        f"# Values of the chart {chart.name}\n",
        f"`helm show values charts/{chart.name}` prints them with their comments.\n",
    )
    return "\n".join([*head, *_table(chart)]) + "\n"


def readme(chart: Path) -> str:
    """Return the chart's README in Markdown."""
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    head = (
        _NOTE.format(source=f"charts/{chart.name}/Chart.yaml and values.yaml"),
        f"# {chart.name}\n",
        f"{about['description']}\n",
        f"Needs Kubernetes {about['kubeVersion'].removesuffix('-0')}. "
        "CRDs are part of the chart, and stay when it is uninstalled.\n",
        "```sh",
        f"helm upgrade --install {chart.name} charts/{chart.name} --namespace poc-system --create-namespace \\",
        "    --values operator-values.yaml",
        f"helm test {chart.name} --namespace poc-system",
        "```\n",
        "## Values\n",
    )
    return "\n".join([*head, *_table(chart)]) + "\n"


def paths(chart: Path) -> list[str]:
    """Return the path of each value, with dots, in the order of values.yaml."""
    return [".".join(path) for path, _, _ in _described(chart)]


def _table(chart: Path) -> list[str]:
    schema = json.loads((chart / "values.schema.json").read_text())
    rows = [_row(leaf, schema) for leaf in _described(chart)]
    return ["| value | type | default | meaning |", "| --- | --- | --- | --- |", *rows]


def _described(chart: Path) -> Iterator["_Leaf"]:
    text = (chart / "values.yaml").read_text()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)  # noqa: S101 - a chart's values are a mapping
    return _leaves(root, text.splitlines(), (), "")


_Leaf = tuple[tuple[str, ...], Any, str]


def _leaves(node: yaml.MappingNode, lines: Sequence[str], path: tuple[str, ...], inherited: str) -> Iterator[_Leaf]:
    """Yield each value with its path and description; a part without a comment has that of the whole."""
    for key, value in node.value:
        here = (*path, key.value)
        own = _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _leaves(value, lines, here, own or inherited)
            continue
        if not own and not inherited:
            raise UndescribedValueError(
                f"{'.'.join(here)} has no comment: describe it after `{_MARK}` in the line above"
            )
        yield here, yaml.safe_load(yaml.serialize(value)), own or inherited


def _comment(lines: Sequence[str], line: int) -> str:
    """Return the comment right above a line, if it is a description."""
    found: list[str] = []
    for above in reversed(lines[:line]):
        text = above.strip()
        if not text.startswith("#"):
            return ""
        found.insert(0, text.removeprefix(_MARK).removeprefix("#").strip())
        if text.startswith(_MARK):
            return " ".join(found)
    return ""


def _row(leaf: _Leaf, schema: Mapping[str, Any]) -> str:
    path, default, description = leaf
    shown = json.dumps(default, ensure_ascii=False)
    return f"| `{'.'.join(path)}` | {_type(path, schema)} | `{shown}` | {description.replace('|', chr(92) + '|')} |"


def _type(path: Sequence[str], schema: Mapping[str, Any]) -> str:
    for name in path:
        schema = schema.get("properties", {}).get(name, {})
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    return str(schema.get("type", "object"))
