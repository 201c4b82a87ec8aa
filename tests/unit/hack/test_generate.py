# SPDX-License-Identifier: Apache-2.0
"""What is generated from the typed API: current, deterministic, and as the API server wants it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.generate import __main__ as generate
from hack.generate import crds, values
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.reasons import Reason
from tests.support.checks.admission import defaulted

ROOT = Path(__file__).parents[3]
WORK = pytest.mark.parametrize("kind", generate.WORK, ids=lambda kind: kind.KIND.kind)
KINDS = pytest.mark.parametrize("kind", generate.KINDS, ids=lambda kind: kind.KIND.kind)


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema within a schema, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def spec_nodes(kind: type[Resource]) -> list[tuple[str, dict[str, Any]]]:
    return list(nodes(crds.schema(kind)["properties"]["spec"], "spec"))


def test_the_repository_has_what_is_generated() -> None:
    assert generate.differences() == []


def test_each_run_writes_the_same() -> None:
    code = "import json; from hack.generate.__main__ import files; print(json.dumps(dict(files())))"
    path = os.pathsep.join(map(str, (ROOT / "operator", ROOT / "image", ROOT)))
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_a_file_that_differs_and_one_that_is_left_over_are_named(tmp_path: Path) -> None:
    generate.write(tmp_path)
    assert generate.differences(tmp_path) == []
    crd, page = tmp_path / "crds/poc.gonka.ai_pocrounds.yaml", tmp_path / "docs/reference/pocround.md"
    crd.write_text(crd.read_text().replace("minimum: 0", "minimum: 1"))
    page.unlink()
    (tmp_path / "docs/reference/old.md").write_text(f"<!-- {generate.MARK} from a kind that is gone. -->")
    (tmp_path / "docs/reference/own.md").write_text("Written by hand.")
    assert generate.differences(tmp_path) == [
        "crds/poc.gonka.ai_pocrounds.yaml is not what would be written",
        "docs/reference/pocround.md is not what would be written",
        "docs/reference/old.md is left over",
    ]
    generate.write(tmp_path)
    assert generate.differences(tmp_path) == []
    assert (tmp_path / "docs/reference/own.md").exists()


@KINDS
def test_the_schema_is_structural(kind: type[Resource]) -> None:
    for path, schema in nodes(crds.schema(kind), kind.KIND.kind):
        assert isinstance(schema.get("type"), str), path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "title", "const", "x-mutable"} & schema.keys(), path
        assert not {"properties", "additionalProperties"} <= schema.keys(), path
        assert not (".status." in path and {"default", "enum"} & schema.keys()), path
        for key in schema.get("x-kubernetes-list-map-keys", ()):
            item = schema["items"]
            assert key in item["required"] or "default" in item["properties"][key], path


@KINDS
def test_no_default_has_a_null_within(kind: type[Resource]) -> None:
    """The API server refuses such a CRD."""
    assert [path for path, node in spec_nodes(kind) if "null" in json.dumps(node.get("default", ""))] == []


@KINDS
def test_every_field_is_explained(kind: type[Resource]) -> None:
    found = crds.schema(kind)["properties"]
    for part in ("spec", "status"):
        for path, schema in nodes(found[part], part):
            for name, child in schema.get("properties", {}).items():
                assert child.get("description", "").endswith("."), f"{path}.{name}"


@KINDS
def test_everything_in_a_spec_is_bounded(kind: type[Resource]) -> None:
    # The API server estimates what rules cost from these bounds, and refuses a CRD whose rules may cost too much.
    for path, schema in spec_nodes(kind):
        match schema["type"]:
            case "string":
                assert "maxLength" in schema or "enum" in schema, path
            case "integer":
                assert {"minimum", "maximum", "format"} <= schema.keys(), path
            case "array":
                assert {"maxItems", "x-kubernetes-list-type"} <= schema.keys(), path
            case "object":
                assert "properties" in schema or "maxProperties" in schema, path


@WORK
def test_a_field_is_fixed_unless_it_is_marked(kind: type[Resource]) -> None:
    spec = crds.schema(kind)["properties"]["spec"]
    rules = [rule for rule in spec["x-kubernetes-validations"] if "messageExpression" in rule]
    assert len(rules) == 1
    mutable = crds.mutable_fields(kind)
    assert mutable >= {"suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished"}
    for name in spec["properties"]:
        assert (f"self.{name} == oldSelf.{name}" in rules[0]["rule"]) == (name not in mutable), name


@KINDS
def test_the_defaults_of_crd_and_models_are_the_same(kind: type[Resource]) -> None:
    spec = crds.schema(kind)["properties"]["spec"]
    minimal = {name: _example(child) for name, child in spec["properties"].items() if name in spec["required"]}
    model = crds.spec_model(kind)
    assert model.model_validate(minimal) == model.model_validate(defaulted(minimal, spec))


def _example(schema: dict[str, Any]) -> object:
    match schema["type"]:
        case "integer":
            return schema["minimum"]
        case "object":
            return (
                {name: _example(child) for name, child in schema["properties"].items() if name in schema["required"]}
                if "required" in schema
                else {}
            )
        case _:
            return "0.1" if "a decimal" in str(schema) else "ab" * 32


def test_every_reason_is_explained() -> None:
    assert EXPLANATIONS.keys() == set(Reason)
    kinds = {kind.KIND.kind for kind in generate.KINDS}
    assert all(told.kinds and told.kinds <= kinds for told in EXPLANATIONS.values())


def a_chart(folder: Path, text: str) -> Path:
    chart = folder / "a-chart"
    chart.mkdir()
    (chart / "values.yaml").write_text(text)
    (chart / "values.schema.json").write_text('{"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}')
    return chart


def test_the_values_of_a_chart_are_listed_with_their_comments(tmp_path: Path) -> None:
    chart = a_chart(
        tmp_path, "# For readers of the file.\n# -- What A is,\n# in two lines.\na:\n  b: 1\n  # -- C.\n  c: {}\n"
    )
    rows = [line for line in values.render(chart).splitlines() if line.startswith("| `")]
    assert rows == ["| `a.b` | integer | `1` | What A is, in two lines. |", "| `a.c` | object | `{}` | C. |"]


def test_a_value_without_a_comment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(values.UndescribedValueError, match=r"a\.b has no comment"):
        values.render(a_chart(tmp_path, "# For readers of the file.\na:\n  b: 1\n"))
