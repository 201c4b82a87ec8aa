# SPDX-License-Identifier: Apache-2.0
"""Which round and which pod a log line is about, as fields that programs can search for."""

import logging
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from poc_operator.model import names
from poc_operator.observed.pods import PodView


class RoundRef(NamedTuple):
    """The names by which people and programs know a round."""

    namespace: str
    name: str
    uid: str


class RoundLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger of one round. Its lines have the field ``object``, as kopf's own lines about the round do."""

    def __init__(self, logger: logging.Logger, ref: RoundRef) -> None:
        kind = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        super().__init__(logger, {"k8s_ref": kind | ref._asdict()})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:  # noqa: ANN401
        """Add the round to what the line says of itself."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


def of(pod: PodView) -> dict[str, str]:
    """Return the ``extra`` of a line about this pod."""
    return {"pod": pod.name}
