# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis makes from an app's OpenAPI document: such as it allows, and such as it forbids."""

from collections.abc import Collection, Sequence
from typing import Any

import schemathesis
from fastapi import FastAPI
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

#: Headers that are the tool's own.
OF_THE_TOOL = {"User-Agent", "Accept-Encoding", "Connection", "X-Schemathesis-TestCaseId"}

#: Of any kind of document.
AnyCase = Case[Any]


def cases(app: FastAPI, names: Collection[str] = ()) -> tuple[Sequence[str], st.SearchStrategy[AnyCase]]:
    """Return the names of an app's operations, and the strategy for cases of these operations, or of all."""
    schema = schemathesis.openapi.from_dict(app.openapi())
    results = list(schema.get_all_operations())
    found = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(found) == len(results), results
    of_all = [
        operation.as_strategy(generation_mode=mode)
        for operation in found
        if not names or operation.label in names
        for mode in GenerationMode
        # Most requests are for routes that take something.
        for _ in range(5 if operation.body or operation.path_parameters or operation.query else 1)
    ]
    return [operation.label for operation in found], st.sampled_from(of_all).flatmap(lambda strategy: strategy)
