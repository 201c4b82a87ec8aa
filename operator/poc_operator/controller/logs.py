# SPDX-License-Identifier: Apache-2.0
"""Which object a log line is about, as kopf tells it; round, slot and pod are bound by `vllm_poc.logs`."""

import logging
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from poc_operator.apis.v1alpha1.meta import API_VERSION, Kind


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
