# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a namespace know of each other, so that they queue for pods: one board per process.

Each round leaves there what its last plan made of it, and is woken when a pod that it waits for falls free. What a
round left is current for some seconds only: a round on which the operator fails must not keep pods from the others.
And a new process waits until all of its rounds have been read once.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from poc_operator.planning.snapshot import OtherRound

#: Seconds for which a plan is known to the others: several turns, the slowest one included.
KNOWN_SECONDS = 30.0
#: Seconds for which the others wait for a round that has yet to be read.
UNREAD_SECONDS = 5.0


@dataclass
class _Entry:
    namespace: str
    wake: asyncio.Event
    since: float
    last: OtherRound | None = None
    gave_up: bool = False

    @property
    def known(self) -> OtherRound | None:
        """What the last plan made of the round, unless the operator has failed on it since."""
        return None if self.gave_up else self.last


class OtherRounds:
    """The rounds of all namespaces, by uid. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, namespace: str) -> asyncio.Lock:
        """Return the lock of the namespace's plans: what others were told is true until one puts something else."""
        return self._turns.setdefault(namespace, asyncio.Lock())

    def expect(self, uid: str, namespace: str, wake: asyncio.Event) -> None:
        """Await the first plan of a round; ``wake`` is set when a pod that it waits for falls free."""
        self._entries.setdefault(uid, _Entry(namespace, wake, self._clock()))

    def put(self, uid: str, told: OtherRound) -> None:
        """Take what the plan of a round has made of it, and wake those that wait for a pod that it gave back."""
        entry = self._entries.get(uid)
        if entry is None:
            return
        before, entry.last, entry.since, entry.gave_up = entry.known, told, self._clock(), False
        if before is None:
            self._wake(uid, entry.namespace, None)
        elif freed := (before.held - told.held) | (before.wanted if before.needs and not told.needs else frozenset()):
            self._wake(uid, entry.namespace, freed)

    def fail(self, uid: str) -> None:
        """Forget what a round wants: the operator fails on it, and tries again later."""
        entry = self._entries.get(uid)
        if entry is not None:
            known, entry.gave_up = entry.known, True
            self._wake(uid, entry.namespace, known.held | known.wanted if known is not None else None)

    def forget(self, uid: str) -> None:
        """Forget a round that is over or gone."""
        self.fail(uid)
        self._entries.pop(uid, None)

    def beside(self, uid: str, namespace: str) -> Sequence[OtherRound] | None:
        """Return the other rounds of the namespace; None while one of them has yet to be read.

        Those on which the operator fails are as they were before, and not current.
        """
        others = [entry for key, entry in self._entries.items() if key != uid and entry.namespace == namespace]
        now = self._clock()
        if any(entry.last is None and not entry.gave_up and now - entry.since < UNREAD_SECONDS for entry in others):
            return None
        return [
            replace(entry.last, current=not entry.gave_up and now - entry.since < KNOWN_SECONDS)
            for entry in others
            if entry.last is not None
        ]

    def _wake(self, uid: str, namespace: str, freed: frozenset[str] | None) -> None:
        """Wake the others of the namespace that want one of these pods; without any, all that want one."""
        for key, entry in self._entries.items():
            if key == uid or entry.namespace != namespace or entry.known is None:
                continue
            if entry.known.needs and (freed is None or entry.known.wanted & freed):
                entry.wake.set()
