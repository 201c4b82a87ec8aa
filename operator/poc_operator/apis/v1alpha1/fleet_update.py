# SPDX-License-Identifier: Apache-2.0
"""How far an update of a fleet is, and what the fleet remembers so that it can tell when pods may be replaced."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from poc_operator.apis.v1alpha1.schema import ApiModel, Int32, Int64, ListMap, Message, Open

#: Rounds and failed templates that a fleet remembers.
MAX_ROUNDS = 16
MAX_FAILED = 4


class UpdatePhase(StrEnum):
    """How far an update is."""

    COMPLETE = "Complete"
    WAITING = "Waiting"
    CANARY = "Canary"
    ROLLING = "Rolling"
    STOPPED = "Stopped"
    FAILED = "Failed"

    @classmethod
    def _missing_(cls, value: object) -> "UpdatePhase | None":
        return cls.COMPLETE if isinstance(value, str) else None  # decided anew from the pods


class FleetRound(ApiModel):
    """A round that had pods of the fleet."""

    uid: str
    """UID of the round."""
    name: str
    """Name of the round."""
    start_time: datetime
    """When it was created."""
    started: bool = True
    """Whether a pod has begun it. One that is over without is forgotten, unless it is the network's."""
    over_time: datetime | None = None
    """When it was over. Not set while it is not."""
    network: bool = False
    """Whether the gateway made it for the network, which validates it afterwards."""
    height: Int64 | None = None
    """Height of its block. Regular rounds of the network are whole epochs apart."""


class FailedUpdate(ApiModel):
    """A template that failed on the canary. It is not tried again."""

    digest: str
    """Digest of the template."""
    revision: str
    """Revision that had this template."""
    message: Message
    """What went wrong."""
    time: datetime
    """When it was found."""
    by_self_check: bool = False
    """Whether a self-check found it. Then it is tried again once `selfCheck.enabled` is false."""


class UpdateStatus(ApiModel):
    """How far the newest revision is on its way to all pods."""

    phase: Annotated[UpdatePhase, Open()] = UpdatePhase.COMPLETE
    """Waiting: a new template is being applied, or waits for the download of its model. Canary: one pod gets the newest
    revision and proves it. Rolling: the others follow. Stopped: one of these failed, and no other pod is replaced until
    it works. Complete: all pods have the newest revision. Failed: the canary failed, and the fleet went back to the
    last good revision."""
    message: Message = ""
    """What the update does or waits for, in one sentence."""
    digest: str = ""
    """Digest of the pods' template that the update is about."""
    canary: str = ""
    """Name of the pod that was replaced first."""
    canary_node: str = ""
    """Kubernetes node that this pod had before. Empty if it had none, or one that was not well."""
    canary_time: datetime | None = None
    """Since when the canary may be created: a pod was evicted for it. Not set while that pod has yet to end."""
    good_revision: str = ""
    """Last revision that all pods had while they were ready. A failed update goes back to it."""
    startup_seconds: Int32 = 0
    """Time from the creation of a pod until it is ready, as the fleet's pods have shown it. 0: not known yet."""
    failed: Annotated[list[FailedUpdate], Field(max_length=MAX_FAILED), ListMap(("digest",))] = Field(
        default_factory=list
    )
    """Templates that failed. One that is listed is not tried again."""
    rounds: Annotated[list[FleetRound], Field(max_length=MAX_ROUNDS), ListMap(("uid",))] = Field(default_factory=list)
    """The last rounds that had pods of the fleet. The times between their starts tell when the next may come."""
