# SPDX-License-Identifier: Apache-2.0
"""The base of all models, and the marks by which a model says what its CRD must enforce.

A mark is metadata of a type, as in ``Annotated[str, Grammar(...)]``, or a `Rule` in a model's ``RULES``. Marks put
``x-kubernetes-*`` keys into the JSON schema that pydantic makes. What they say in CEL is checked by the API server;
a `Grammar` is checked by pydantic as well, since texts also come from elsewhere, as from ConfigMaps.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainSerializer
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

VALIDATIONS = "x-kubernetes-validations"
PRESERVED = "x-kubernetes-preserve-unknown-fields"
#: Mark of a field that may be changed while the object exists. It is the generator's own and stands in no CRD.
MUTABLE = "x-mutable"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A CEL rule over ``self``, and what the API server answers to a value that breaks it.

    ``message`` names the field and the remedy. ``message_expression`` is CEL for a message that depends on the value.
    ``field_path`` is where the error is reported, relative to ``self``.
    """

    rule: str
    message: str
    message_expression: str | None = None
    field_path: str | None = None

    def to_json(self) -> dict[str, str]:
        """Return the rule as an entry of ``x-kubernetes-validations``."""
        keys = {"messageExpression": self.message_expression, "fieldPath": self.field_path}
        return {"rule": self.rule, "message": self.message, **{key: value for key, value in keys.items() if value}}

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = handler(schema)
        json_schema[VALIDATIONS] = [*json_schema.get(VALIDATIONS, []), self.to_json()]
        return json_schema


@dataclass(frozen=True)
class Grammar:
    """A pattern in RE2's syntax that the whole text must match; ``message`` says what it must be."""

    pattern: str
    message: str

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        rule = Rule(rule=f"self.matches({cel_text(f'^(?:{self.pattern})$')})", message=self.message)
        return rule.__get_pydantic_json_schema__(schema, handler)

    def _check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(self.message)
        return text


@dataclass(frozen=True)
class ListMap:
    """A list whose items are told apart by these keys: none may come twice."""

    keys: tuple[str, ...]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        marks = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(self.keys)}
        return {**handler(schema), **marks}


@dataclass(frozen=True)
class Mutable:
    """A field of the spec that may be changed while the object exists; all others are fixed."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), MUTABLE: True}


@dataclass(frozen=True)
class Open:
    """An enumeration of a status: the CRD lists no values, so that one of a newer operator is stored all the same."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        handler(schema)
        return {"type": "string"}


@dataclass(frozen=True)
class Preserved:
    """An object of which the API server stores every field, as one of another API's types."""

    fields: int = 64

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        handler(schema)
        return {"type": "object", PRESERVED: True, "maxProperties": self.fields}


def cel_text(text: str) -> str:
    """Return ``text`` as a CEL literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _camel(name: str) -> str:
    return to_camel(name).replace("Url", "URL")


class ApiModel(BaseModel):
    """What is stored in the API server: camelCase there, snake_case here. Fields that are not known are ignored."""

    model_config = ConfigDict(
        alias_generator=_camel, populate_by_name=True, extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    #: What the API server checks on the whole object; subclasses add to the rules of their bases.
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        """Return the rules of the class and its bases."""
        return tuple(rule for base in reversed(cls.__mro__) for rule in base.__dict__.get("RULES", ()))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = handler(schema)
        if rules := cls.rules():
            handler.resolve_ref_schema(json_schema)[VALIDATIONS] = [rule.to_json() for rule in rules]
        return json_schema


def aliases(model: type[ApiModel]) -> Mapping[str, str]:
    """Return the fields' names in the API, by their names here."""
    return {name: str(field.alias) for name, field in model.model_fields.items()}


Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(json_schema_extra={"format": "int64"})]

#: Bytes of a message that are stored, and of an error that several slots share. Messages are cut when they are
#: written, so that a status with a thousand slots fits whatever pods and proxies answer.
MESSAGE_BYTES = 512
ERROR_BYTES = 200


def number_of(count: int, one: str, many: str = "") -> str:
    """Return how many there are: "1 pod", "2 pods". ``many`` is the plural, by default ``one`` with an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def shorten(text: str, limit: int = MESSAGE_BYTES) -> str:
    """Return the text, cut with an ellipsis where it exceeds ``limit`` bytes of UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return text
    return encoded[: limit - 3].decode(errors="ignore") + "…"


#: Text for people, cut when it is stored.
Message = Annotated[str, PlainSerializer(shorten)]
