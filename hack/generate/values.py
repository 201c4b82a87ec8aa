# SPDX-License-Identifier: Apache-2.0
"""The reference of a chart's values, from the comments of values.yaml and the types of values.schema.json.

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
    source = chart / "values.yaml"
    text = source.read_text()
    schema = json.loads((chart / "values.schema.json").read_text())
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)  # noqa: S101 - a chart's values are a mapping
    rows = [_row(row, schema) for row in _leaves(root, text.splitlines(), (), "")]
    head = (
        _NOTE.format(source=f"charts/{chart.name}/values.yaml"),
        f"# Values of the chart {chart.name}\n",
        f"`helm show values charts/{chart.name}` prints them with their comments.\n",
        "| value | type | default | meaning |",
        "| --- | --- | --- | --- |",
    )
    return "\n".join([*head, *rows]) + "\n"


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
