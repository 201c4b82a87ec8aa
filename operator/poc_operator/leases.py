# SPDX-License-Identifier: Apache-2.0
"""How long a pod computes a round that nobody asks for, and from when on it is certain that it does not any more.

A pod is told for how many seconds it may compute without being asked again: its lease, which the polls of the operator
renew. A slot moves to another pod when its pod has confirmed the stop, or when the pod's lease has run out. For the
second the operator must know a moment by which every lease that it, or an operator before it, has given has run out.
So that moment is recorded first, some time ahead, and a poll renews only what ends before it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

#: The lease, unless the operator is told otherwise.
LEASE_SECONDS = 3600
#: Shorter ones would run out while a pod or the operator is just slow.
LEAST_LEASE_SECONDS = 60
#: A poll may arrive late, and the clocks of two operators may differ; both together by no more than this.
MARGIN = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """What the polls of one round may renew: the leases of these pods, for ``seconds``, if they end before ``end``."""

    round_id: str
    uids: Collection[str | None]
    seconds: int
    end: datetime

    def is_of(self, uid: str, now: datetime) -> bool:
        """Whether a poll of this pod renews, if it is sent now."""
        return uid in self.uids and now + timedelta(seconds=self.seconds) + MARGIN <= self.end


def recorded_end(recorded: datetime | None, now: datetime, seconds: int) -> datetime:
    """Return by when all leases of ``seconds`` end that are given until the next plans: as recorded, or later."""
    lease, ahead = timedelta(seconds=seconds) + MARGIN, timedelta(seconds=seconds // 4)
    if recorded is not None and recorded >= now + lease + ahead / 2:
        return recorded
    return now + lease + ahead
