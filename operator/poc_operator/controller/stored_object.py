# SPDX-License-Identifier: Apache-2.0
"""One object as the API server has it: read from what its watch tells, and its status written.

A turn asks the API server for nothing. What the watch tells late does no harm: a plan is recorded against the version
that it was made from. One of an outdated object is refused, and the object is read before it is planned again.

A write for every turn of every round would be most of the API server's work. So a status in which only counters moved
is held back for some seconds. It is lost with the process, and the next one asks the pods anyway. The first results of
a round are written at once: who waits for them cannot tell a 0 from a round that gets nothing done.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic

from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.clients.kube.objects import ObjectStore, parse_object
from poc_operator.controller.event_loop import Computing
from poc_operator.controller.kinds import WorkT
from poc_operator.controller.logs import ObjectRef
from poc_operator.planning.snapshot import Work

#: Seconds for which the watch is relied on alone: it may be stale.
READ_SECONDS = 60.0
#: Seconds between two writes of a status in which only counters moved.
COUNTERS_SECONDS = 15.0
#: Seconds after which they are late. If the next turn will come after that, they are written some seconds before they
#: are due. Not much sooner: writes of many rounds, whose turns take long, would become more when there is least time.
LATE_SECONDS = 18.0
EARLY_SECONDS = 1.5

Body = Mapping[str, Any]


class ObjectReader(Generic[WorkT]):
    """The newest that is known of one object. ``clock`` returns seconds of any monotonic clock."""

    def __init__(
        self,
        resource: type[WorkT],
        ref: ObjectRef,
        store: ObjectStore,
        clock: Callable[[], float],
        computing: Computing,
    ) -> None:
        self._computing = computing
        self._resource = resource
        self._ref = ref
        self._store = store
        self._clock = clock
        self._known: WorkT | None = None
        self._told: Body | None = None  # by the watch, and not understood yet
        self._read_at = clock()

    def tell(self, body: Body) -> None:
        """Remember what the watch tells of the object."""
        self._told = body

    def remember(self, work: WorkT | None) -> None:
        """Remember the object as it was written; without it, it is read next."""
        self._known = work

    @property
    def known(self) -> WorkT | None:
        """The object as it was read or written last; None if it must be read."""
        return self._known

    def forget(self) -> None:
        """Read the object next: it is not what was known of it."""
        self._known = self._told = None

    async def read(self) -> WorkT | None:
        """Return the object; None if it does not exist, or another one has its name.

        UnreadableObject if it cannot be understood; errors as from `ObjectStore.get` if it must be asked for.
        """
        told, self._told = self._told, None
        known, self._known = self._known, None  # if it cannot be understood, it is not what it was either
        if self._clock() - self._read_at >= READ_SECONDS or (known is None and told is None):
            known = await self._store.get(self._resource, self._ref.namespace, self._ref.name)
            self._read_at = self._clock()
        elif told is not None and (known is None or _is_newer(told, known)):
            known = await self._computing.done(partial(parse_object, self._resource, told), _shares_of(told))
        self._known = known if known is not None and known.metadata.uid == self._ref.uid else None
        return self._known


def _is_newer(told: Body, known: Work) -> bool:
    """Whether the watch tells of a later version. Kubernetes lets the versions of one resource be compared."""
    return int(told["metadata"]["resourceVersion"]) > int(known.metadata.resource_version)


def _shares_of(body: Body) -> int:
    """Return how many shares the object has, if it is a round: the others have few."""
    slots = (body.get("status") or {}).get(RoundStatus.SHARES)
    return len(slots) if isinstance(slots, list) else 0


class StatusRecorder(Generic[WorkT]):
    """Writes the status of one object. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float], computing: Computing) -> None:
        self._store = store
        self._computing = computing
        self._clock = clock
        self._written = float("-inf")
        self._turned = clock()  # when the last turn recorded something
        # The newest status, with the stored one that it was made from or is stored as: what is stored has its errors
        # cut, and may lag behind by what was held back.
        self._known: tuple[WorkStatus, WorkStatus] | None = None
        self._held_back = False  # whether the newest status is still to be written
        self._told_results = False  # whether any results were ever stored: they are the first ones once only

    def newest(self, stored: WorkT) -> WorkT:
        """Return the object with the status that was recorded last, unless somebody has written another one since."""
        if self._known is None or self._known[0] != stored.status:
            return stored
        newest: Any = stored.model_copy(update={"status": self._known[1]})
        found: WorkT = newest
        return found

    async def record(self, stored: WorkT, status: WorkStatus) -> WorkT | None:
        """Write the status, or hold it back. Return what is stored from now on; None if that must be read.

        Errors as from `ObjectStore.write_status`.
        """
        now = self._clock()
        turn, self._turned = now - self._turned, now
        if status == self.newest(stored).status and not self._held_back:
            return stored
        written, only_counters = await self._computing.done(
            partial(_compare, status, stored.status), len(status.shares)
        )
        self._told_results = self._told_results or _has_results(stored.status)
        only_counters = only_counters and (self._told_results or not _has_results(written))
        age = now - self._written
        due = COUNTERS_SECONDS - (EARLY_SECONDS if age + turn >= LATE_SECONDS else 0.0)
        fresh = age < due
        if written == stored.status or (fresh and only_counters):
            self._known, self._held_back = (stored.status, status), written != stored.status
            return stored
        version = await self._store.write_status(stored, status)
        self._written, self._known, self._held_back = self._clock(), (written, status), False
        if version is None:
            return None
        metadata = stored.metadata.model_copy(update={"resource_version": version})
        written_object: Any = stored.model_copy(update={"metadata": metadata, "status": written})
        found: WorkT = written_object
        return found


def _compare(status: WorkStatus, stored: WorkStatus) -> tuple[WorkStatus, bool]:
    """Return the status as it will be read again, and whether it differs from what is stored in counters at most.

    Those are held back for rounds alone: the others have few.
    """
    written = type(status).model_validate(status.stored())
    if not isinstance(written, RoundStatus) or not isinstance(stored, RoundStatus):
        return written, False
    return written, written.without_counters() == stored.without_counters()


def _has_results(status: WorkStatus) -> bool:
    return isinstance(status, RoundStatus) and status.totals.delivered > 0
