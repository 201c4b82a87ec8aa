# SPDX-License-Identifier: Apache-2.0
"""What the OpenAPI document says of a body that a route reads by itself."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return FastAPI's ``openapi_extra`` for a route whose body is one of ``models`` as JSON."""
    schemas = [_inlined(schema, schema.get("$defs", {})) for schema in (model.model_json_schema() for model in models)]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"anyOf": schemas}}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    # References are to the schema itself, which is not where the document ends up with it.
    if isinstance(schema, list):
        return [_inlined(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items() if name != "$defs"}
