# SPDX-License-Identifier: Apache-2.0
"""Attributes of vLLM's objects that have another value while PoC's forward pass runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """``owner.name`` is to be ``value``; also in place of a method of the owner's class."""

    owner: object
    name: str
    value: Any


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply patches while the context lasts. Chat, which runs between, never meets one."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    missing = object()
    try:
        for owner, name, value in patches:
            attributes = vars(owner)
            undo.append((attributes, name, attributes.get(name, missing)))
            attributes[name] = value
        yield
    finally:
        for attributes, name, before in reversed(undo):
            if before is missing:
                del attributes[name]
            else:
                attributes[name] = before
