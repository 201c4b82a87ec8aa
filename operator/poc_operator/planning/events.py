# SPDX-License-Identifier: Apache-2.0
"""Events of one plan: few, however many slots they are about. The API server limits how many an operator may post."""

from collections.abc import Sequence
from dataclasses import replace

from poc_operator.planning.snapshot import WorkEvent

#: So many Events of one kind are posted by themselves; more become one that names the first.
MOST_ALIKE = 3


def condensed(events: Sequence[WorkEvent]) -> Sequence[WorkEvent]:
    """Return the Events with those of one reason and one kind of loss put together, where there are many."""
    alike: dict[object, list[WorkEvent]] = {}
    for event in events:
        alike.setdefault((event.reason, event.loss, event.warning), []).append(event)
    return [event for found in alike.values() for event in (found if len(found) <= MOST_ALIKE else [_joined(found)])]


def _joined(events: Sequence[WorkEvent]) -> WorkEvent:
    first = events[0]
    return replace(first, message=f"{len(events)} slots, the first: {first.message}", count=len(events))
