# SPDX-License-Identifier: Apache-2.0
"""The states of an item that is to be sent, and what may follow what. No item leaves the gateway without an end.

::

    waiting ──┬── accepted ──> delivered
       ^      ├── expired ───> expired ──────────────────┐
       │      ├── abandoned ─> abandoned <── abandoned ──┤
       │      ├── refused ───> refused ──────────────────┤
       │      └── disputed ──> disputed ── settled ──┐   │
       └───────────────────────┴─────────────────────┘   │
       └────────────────────── replayed ─────────────────┘

    kept: has no receiver. What is disputed expires and is abandoned as what waits.

An artifact of a round has no row of its own while it waits for its turn: every one behind its slot's
``forwarded_nonce`` is waiting.
"""

from enum import StrEnum


class State(StrEnum):
    """What has become of an item."""

    #: It is to be sent.
    WAITING = "waiting"
    #: Its receiver has accepted it.
    DELIVERED = "delivered"
    #: Its receiver refused it for good: a dead letter.
    REFUSED = "refused"
    #: It was not accepted until its stage had been over for ``delivery_seconds``.
    EXPIRED = "expired"
    #: Somebody gave it up.
    ABANDONED = "abandoned"
    #: Another pod's result for the same nonce is another: the honest one is to be found first.
    DISPUTED = "disputed"
    #: It has no receiver.
    KEPT = "kept"


class Event(StrEnum):
    """What happens to an item."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    REPLAYED = "replayed"
    DISPUTED = "disputed"
    SETTLED = "settled"


_TRANSITIONS = {
    Event.ACCEPTED: ({State.WAITING}, State.DELIVERED),
    Event.REFUSED: ({State.WAITING}, State.REFUSED),
    Event.EXPIRED: ({State.WAITING, State.DISPUTED}, State.EXPIRED),
    Event.ABANDONED: ({State.WAITING, State.DISPUTED, State.REFUSED}, State.ABANDONED),
    Event.DISPUTED: ({State.WAITING}, State.DISPUTED),
    Event.SETTLED: ({State.DISPUTED}, State.WAITING),
    Event.REPLAYED: ({State.REFUSED, State.EXPIRED, State.ABANDONED}, State.WAITING),
}
#: States that only a person changes.
ENDS = frozenset({State.DELIVERED, State.REFUSED, State.EXPIRED, State.ABANDONED})


def sources(event: Event) -> frozenset[State]:
    """Return the states in which ``event`` changes something; in all others it changes nothing."""
    return frozenset(_TRANSITIONS[event][0])


def target(event: Event) -> State:
    """Return the state after ``event``."""
    return _TRANSITIONS[event][1]


def after(state: State, event: Event) -> State:
    """Return the state that follows ``state``; the same where the event changes nothing."""
    return target(event) if state in sources(event) else state
