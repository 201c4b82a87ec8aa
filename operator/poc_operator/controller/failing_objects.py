# SPDX-License-Identifier: Apache-2.0
"""One bad object harms nobody: what happens to an object that the operator cannot read, plan or act on.

Each exception is logged and counted, and the user is told: by the conditions of `internal_error`, and by an Event
for each new message. Then the object pauses. Pauses double, and only another spec ends one early: news of pods would
not help. All other objects go on, and liveness does not depend on it.

A deleted object that cannot be read is released at once, and any other after `RELEASE_SECONDS`, which `pods_left`
tells. What pods compute for an object that is gone the reaper stops.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime

from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.schema import number_of, shorten
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.actions import Emit
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.metrics import Metrics
from poc_operator.planning.conditions import Verdict, conditions_of
from poc_operator.planning.snapshot import WorkEvent
from vllm_poc.wire.messages import MAX_TEXT

#: First and longest pause, in seconds, between two tries of an object on which the operator fails.
FIRST_PAUSE_SECONDS = 4.0
MOST_PAUSE_SECONDS = 300.0
#: Seconds for which a deleted object waits for its pods to stop; a pod flushes for 30 s at most.
RELEASE_SECONDS = 120.0

_REMEDY = "it stands still and is tried again, less and less often: look at the operator's log, or delete the object"


def internal_error(error: Exception, now: datetime, generation: int) -> tuple[Iterable[Condition], WorkEvent]:
    """Return the conditions and the Event for an exception while an object was read, planned or acted on."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = f"{shorten(what, MAX_TEXT // 2)}; {_REMEDY}"
    verdicts: dict[ConditionType, Verdict] = {
        ConditionType.PROGRESSING: (False, Reason.INTERNAL_ERROR, message),
        ConditionType.DEGRADED: (True, Reason.INTERNAL_ERROR, message),
    }
    event = WorkEvent(reason=Reason.INTERNAL_ERROR, message=message, warning=True)
    return conditions_of(verdicts, now, generation), event


class FailureBackoff:
    """The failures of the operator on one object, and the pause after each."""

    def __init__(
        self,
        resource: type[Resource],
        ref: ObjectRef,
        *,
        store: ObjectStore,
        metrics: Metrics,
        emit: Emit,
        log: ObjectLogger,
    ) -> None:
        self._resource = resource
        self._ref = ref
        self._store = store
        self._metrics = metrics
        self._emit = emit
        self._log = log
        self._pause = FIRST_PAUSE_SECONDS
        self._told = ""  # message of the last Event
        #: Set when the spec has changed, which ends a pause.
        self.spec_changed = asyncio.Event()

    def succeeded(self) -> None:
        """Begin anew with the shortest pause; called after each turn without a failure."""
        self._pause, self._told = FIRST_PAUSE_SECONDS, ""

    async def failed(self, error: Exception, generation: int) -> None:
        """Log, count and tell the failure; ``generation`` is that of the spec, 0 if it is not known."""
        self._log.error("the operator fails on this object; others go on", exc_info=error)
        self._metrics.work_failed(error)
        try:
            await self._tell(error, generation)
        except Exception as another:
            self._log.warning("the failure cannot be told in the object: %s", another)

    async def pause(self, at_most: float = MOST_PAUSE_SECONDS) -> None:
        """Wait until it is time for another try, or the spec has changed."""
        seconds, self._pause = min(self._pause, at_most), min(2 * self._pause, MOST_PAUSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.spec_changed.wait()

    async def _tell(self, error: Exception, generation: int) -> None:
        conditions, event = internal_error(error, datetime.now(UTC).replace(microsecond=0), generation)
        if event.message != self._told:
            self._told = event.message
            self._emit(event)
        namespace, name = self._ref.namespace, self._ref.name
        await self._store.write_conditions(
            self._resource, namespace, name, conditions, message=event.message, degraded=event.reason
        )


def pods_left(left: int) -> WorkEvent:
    """Return the Event for a deleted object that is released while pods may compute for it."""
    pods = number_of(left, "pod has", "pods have")
    message = (
        f"the object is deleted although {pods} not confirmed the stop: look whether they answer; "
        "the operator stops those that come back"
    )
    return WorkEvent(reason=Reason.PODS_LEFT, message=message, warning=True)
