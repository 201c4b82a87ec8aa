# SPDX-License-Identifier: Apache-2.0
"""Which object and which pod a log line is about, as fields that programs can search for."""

import logging
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from poc_operator.apis.v1alpha1.meta import API_VERSION, Kind
from poc_operator.observed import PodView


class ObjectRef(NamedTuple):
    """The names by which people and programs know an object of a kind."""

    namespace: str
    name: str
    uid: str


class ObjectLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger of one object. Its lines have the field ``object``, as kopf's own lines about the object do."""

    def __init__(self, logger: logging.Logger, kind: Kind, ref: ObjectRef) -> None:
        super().__init__(logger, {"k8s_ref": {"apiVersion": API_VERSION, "kind": kind.kind, **ref._asdict()}})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:  # noqa: ANN401
        """Add the object to what the line says of itself."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


def of(pod: PodView) -> dict[str, str]:
    """Return the ``extra`` of a line about this pod."""
    return {"pod": pod.name}
