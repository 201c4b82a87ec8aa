# SPDX-License-Identifier: Apache-2.0
"""Faults at random moments. A seed decides all of them: when, which, for how long, and whom they strike."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

#: Mean seconds between two faults, and before the first.
MEAN_GAP_SECONDS = 6.0


class Kind(StrEnum):
    """What happens."""

    OPERATOR_KILLED = "operator killed"
    POD_DELETED = "pod deleted"
    ENGINE_KILLED = "engine killed"
    API_SERVER_FROZEN = "API server frozen"
    API_SERVER_KILLED = "API server killed"
    GATEWAY_KILLED = "gateway killed"
    RECEIVER_AWAY = "receiver away"
    RECEIVER_FAILING = "receiver failing"
    ROUND_SUSPENDED = "round suspended"
    POD_RELABELLED = "pod relabelled"
    POISON = "poison round"


@dataclass(frozen=True)
class _Habit:
    weight: float
    least_seconds: float
    most_seconds: float


# How often each fault comes, and how long it lasts: until the operator, gateway, engine or API server is back, the
# receiver answers, the round is resumed, the deleted pod has ended, the label is back, or the poison round is deleted.
_HABITS = {
    Kind.OPERATOR_KILLED: _Habit(3, 0, 5),
    Kind.POD_DELETED: _Habit(3, 0, 8),
    Kind.ENGINE_KILLED: _Habit(3, 0.2, 5),
    Kind.API_SERVER_FROZEN: _Habit(0.5, 5, 60),
    Kind.API_SERVER_KILLED: _Habit(0.5, 5, 60),
    Kind.GATEWAY_KILLED: _Habit(3, 0, 5),
    Kind.RECEIVER_AWAY: _Habit(1, 1, 6),
    Kind.RECEIVER_FAILING: _Habit(1, 1, 6),
    Kind.ROUND_SUSPENDED: _Habit(2, 0, 10),
    Kind.POD_RELABELLED: _Habit(2, 0, 20),
    Kind.POISON: _Habit(1.5, 5, 30),
}


#: The API server's last outage ends with the schedule at the latest: the rounds need the calm after it to catch up.
OUTAGES = (Kind.API_SERVER_FROZEN, Kind.API_SERVER_KILLED)


@dataclass(frozen=True)
class Fault:
    """One fault, ``at`` seconds after the beginning; ``victim`` counts through whoever can be struck."""

    at: float
    kind: Kind
    seconds: float
    victim: int

    def __str__(self) -> str:
        return f"{self.at:6.1f} s: {self.kind}, number {self.victim}, for {self.seconds:.1f} s"


def schedule(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of ``seconds``."""
    random, at, faults = Random(seed), 0.0, list[Fault]()  # noqa: S311 - not for secrets
    while (at := at + random.expovariate(1 / MEAN_GAP_SECONDS)) < seconds:
        kind = random.choices(list(_HABITS), [habit.weight for habit in _HABITS.values()])[0]
        habit = _HABITS[kind]
        lasting = random.uniform(habit.least_seconds, habit.most_seconds)
        fault = Fault(at, kind, lasting, random.randrange(1000))
        if kind not in OUTAGES or at + lasting < seconds:
            faults.append(fault)
    return faults
