# SPDX-License-Identifier: Apache-2.0
"""The reference page of one kind, from its models."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hack.generate.crds import Schema, is_work, mutable_fields, schema
from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS, Explanation
from poc_operator.apis.v1alpha1.meta import API_VERSION, Resource
from poc_operator.apis.v1alpha1.schema import VALIDATIONS

_NOTE = "<!-- Written by `make generate` from {source}: do not edit. -->"


class _Field(NamedTuple):
    path: str
    schema: Schema
    required: bool


def render(kind: type[Resource], *, source: str) -> str:
    """Return the page in Markdown; ``source`` names the module that it is made of."""
    found = schema(kind)
    parts = (
        _NOTE.format(source=source),
        *_head(kind, found),
        *_spec(kind, found["properties"]["spec"]),
        *_columns(kind),
        *_status(kind, found["properties"]["status"]),
        *_conditions(kind),
        *_reasons(kind),
    )
    return "\n".join(parts) + "\n"


def _head(kind: type[Resource], found: Schema) -> Iterator[str]:
    names = kind.KIND
    yield f"# {names.kind} reference\n"
    yield found["description"] + "\n"
    yield f"`{API_VERSION}`, kind `{names.kind}`, namespaced. Short name `{names.short}`, category `poc`."
    yield f"`kubectl explain {names.singular}.spec` shows the same fields on your cluster."
    yield "`kubectl apply --dry-run=server` checks an object without creating it.\n"


def _spec(kind: type[Resource], spec: Schema) -> Iterator[str]:
    yield "## Spec\n"
    if is_work(kind):
        yield "Fields marked ✎ may be changed at any time. All others are fixed once the object exists.\n"
    else:
        yield "All fields may be changed at any time, within the rules below.\n"
    mutable = mutable_fields(kind)
    yield from _table(
        ("field", "type", "default", "meaning and limits"),
        (
            (
                f"`{field.path}`{' ✎' if field.path in mutable else ''}",
                _type(field.schema),
                _default(field),
                _text(field.schema),
            )
            for field in _fields(spec)
        ),
    )
    rules = [(field.path, rule["message"]) for field in _fields(spec) for rule in field.schema.get(VALIDATIONS, ())]
    own = [rule for rule in spec[VALIDATIONS] if "oldSelf" not in rule["rule"]]
    yield "### Rules\n"
    yield "The API server refuses an object that breaks one of these.\n"
    yield from _table(
        ("field", "message"),
        [(f"`spec{rule.get('fieldPath', '')}`", _cell(rule["message"])) for rule in own]
        + [(f"`spec.{path}`", _cell(message)) for path, message in rules],
    )


def _columns(kind: type[Resource]) -> Iterator[str]:
    yield "## Columns\n"
    yield from _table(
        ("column", "from", "meaning", "shown"),
        (
            (
                column.name.upper(),
                f"`{column.json_path}`",
                column.description,
                "with `-o wide`" if column.wide else "always",
            )
            for column in kind.COLUMNS
        ),
    )


def _status(kind: type[Resource], status: Schema) -> Iterator[str]:
    yield "## Status\n"
    if is_work(kind):
        yield "Counters and the wording of messages are up to some seconds old. Everything else is written at once."
    yield "A number that is missing is 0.\n"
    fields = (field for field in _fields(status) if not field.path.startswith("conditions[]"))
    yield from _table(
        ("field", "type", "meaning"),
        ((f"`{field.path}`", _type(field.schema), _text(field.schema)) for field in fields),
    )


def _conditions(kind: type[Resource]) -> Iterator[str]:
    yield "## Conditions\n"
    goal, what = ("Complete", "the end") if is_work(kind) else ("Ready", "all pods")
    yield f"`kubectl wait {kind.KIND.singular}/NAME --for=condition={goal} --timeout=10m` waits for {what}."
    if is_work(kind):
        yield "Failed work never gets there, so programs should look at `Failed` as well.\n"
    else:
        yield "A fleet that is stalled does not get there, so programs should look at `Stalled` as well.\n"
    meanings = kind.CONDITIONS or {found: found.meaning for found in ConditionType}
    yield from _table(("type", "status `True` means"), ((f"`{found}`", meaning) for found, meaning in meanings.items()))


def _stage(told: Explanation) -> int:
    """Return 0 for what keeps work from starting, 1 for what is wrong while it runs, 2 for what ends it."""
    if any(word in told.where for word in ("Ready=Unknown", "Accepted", "Progressing=False")):
        return 0
    return 2 if told.where.startswith("Failed=True") else 1


def _reasons(kind: type[Resource]) -> Iterator[str]:
    own = {reason: told for reason, told in EXPLANATIONS.items() if kind.KIND.kind in told.kinds}
    yield "### Reasons that need something from you\n"
    if is_work(kind):
        own = dict(sorted(own.items(), key=lambda item: _stage(item[1])))
        yield "In the order in which you may meet them: while the object waits, while it runs, and at its end.\n"
    yield from _table(
        ("reason", "where", "what it means", "what to do"),
        ((f"`{reason}`", told.where, told.meaning, told.remedy) for reason, told in own.items() if told.remedy),
    )
    yield "### Reasons that only inform\n"
    yield from _table(
        ("reason", "where", "what it means"),
        ((f"`{reason}`", told.where, told.meaning) for reason, told in own.items() if not told.remedy),
    )


def _fields(parent: Schema, prefix: str = "") -> Iterator[_Field]:
    """Yield the fields below an object, each before those below it; those of a list's items after ``[]``."""
    for name, child in parent.get("properties", {}).items():
        yield _Field(f"{prefix}{name}", child, name in parent.get("required", ()))
        yield from _fields(child, f"{prefix}{name}.")
        yield from _fields(child.get("items", {}), f"{prefix}{name}[].")


def _type(schema: Schema) -> str:
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}s"
    if "additionalProperties" in schema:
        return "map"
    return "time" if schema.get("format") == "date-time" else str(schema["type"])


def _default(field: _Field) -> str:
    if field.required:
        return "required"
    default = field.schema.get("default")
    if default in (None, {}, ""):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, dict):
        return f"`{_flow(default)}`"
    return f"`{default}`"


def _flow(value: Any) -> str:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _text(schema: Schema) -> str:
    limits = [_cell(schema.get("description", "")), *_limits(schema)]
    return " ".join(filter(None, limits))


def _limits(schema: Schema) -> Iterator[str]:
    if "enum" in schema:
        yield "One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + "."
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"{_number(low)} to {_number(high)}."
    for key, what in (("maxLength", "characters"), ("maxItems", "entries"), ("maxProperties", "entries")):
        if key in schema:
            yield f"Up to {_number(schema[key])} {what}."


def _number(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str | None]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell or '' for cell in row)} |"
    yield ""
