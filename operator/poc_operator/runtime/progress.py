# SPDX-License-Identifier: Apache-2.0
"""How long pods have got nothing done, or have not answered: what no single poll can tell.

A new process starts to count anew, which only delays what is done about such a pod.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from poc_operator.model.pods import PodReport
from vllm_poc.wire.messages import PowState, StatusResponse


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What changes when a pod gets on: its session and round, how far it is, what held it back."""

    session: str
    round_id: str | None
    computed: int
    held_back: float


class ProgressWatch:
    """Measures the pods of one round. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._moved: dict[str, tuple[Mark, float]] = {}

    def measured(self, uid: str, report: PodReport) -> PodReport:
        """Return the report with ``stalled_seconds`` and ``silent_seconds``."""
        now = self._clock()
        status = report.status
        if status is None:
            return replace(report, silent_seconds=now - self._answered.setdefault(uid, now))
        self._answered[uid] = now
        mark = _mark(status)
        if self._moved.get(uid, (None, now))[0] != mark or _excused(status):
            self._moved[uid] = (mark, now)
        return replace(report, stalled_seconds=now - self._moved[uid][1])

    def forget_others(self, uids: Iterable[str]) -> None:
        """Forget every pod but these."""
        known = set(uids)
        for memory in (self._answered, self._moved):
            for uid in memory.keys() - known:
                del memory[uid]


def _mark(status: StatusResponse) -> Mark:
    return Mark(
        session=status.session_id,
        round_id=status.round_id,
        computed=status.next_index,
        held_back=status.held_back_seconds,
    )


def _excused(status: StatusResponse) -> bool:
    """Whether the pod has nothing to get on with, or waits for the receiver of its results."""
    if status.end_index is not None and status.next_index >= status.end_index:
        return True
    return status.state is not PowState.GENERATING or status.delivery_error is not None
