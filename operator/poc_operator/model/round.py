# SPDX-License-Identifier: Apache-2.0
"""A PoCRound as one value."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from pydantic import Field

from poc_operator.model.base import ApiModel
from poc_operator.model.spec import RoundSpec
from poc_operator.model.status import RoundStatus
from poc_operator.observed.pods import PodView


class Metadata(ApiModel):
    """The part of the object's metadata that the operator uses."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    creation_timestamp: datetime
    deletion_timestamp: datetime | None = None


class Round(ApiModel):
    """One PoCRound."""

    metadata: Metadata
    spec: RoundSpec
    status: RoundStatus = Field(default_factory=RoundStatus)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Build a round from the API server's JSON."""
        return cls.model_validate(dict(body))

    def selects(self, pod: PodView) -> bool:
        """Whether the pod is one of the round's."""
        return pod.namespace == self.metadata.namespace and self.spec.selector.matches(pod.labels)

    @property
    def id(self) -> str:
        """Round id on the wire. A round deleted and created anew under its old name is another round."""
        return self.metadata.uid
