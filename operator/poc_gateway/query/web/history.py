# SPDX-License-Identifier: Apache-2.0
"""Rates and chat over the last hour, as this process has measured them.

They are kept in memory: after a restart the curve begins anew, and says so. Chat is what went through this gateway.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from poc_gateway.metrics import HTTP_SECONDS

#: A point covers so many seconds, and so many points are kept: an hour.
POINT_SECONDS, MOST_POINTS = 15.0, 240
#: The route of all chat, as the telemetry of the network's port names it; what is refused is no answer.
_CHAT = {"port": "network", "route": "/v1/{path}", "status": "2xx"}

#: Requests that took no longer than so many seconds, by that time: a Prometheus histogram.
Buckets = Mapping[float, float]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was counted up to a moment: results by round, and requests of chat that were answered."""

    at: float
    stored: Mapping[str, int]
    chat: Buckets


class History:
    """The points of the last hour; each is JSON."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: Reading | None = None
        self.began = clock()
        self.points = deque[dict[str, Any]](maxlen=MOST_POINTS)

    def due_in(self) -> float:
        """Return after how many seconds the next point is due."""
        return 0.0 if self._last is None else max(0.0, self._last.at + POINT_SECONDS - self._clock())

    def add(self, stored: Mapping[str, int], chat: Buckets | None = None) -> bool:
        """Take what is stored now, by round; return whether that made a point. The first look makes none."""
        now = Reading(at=self._clock(), stored=stored, chat=chat_buckets() if chat is None else chat)
        last = self._last
        if last is not None and now.at - last.at < POINT_SECONDS:
            return False
        self._last = now
        if last is not None:
            self.points.append(_point(last, now))
        return last is not None


def _point(last: Reading, now: Reading) -> dict[str, Any]:
    seconds = now.at - last.at
    # A round that is seen for the first time began within the interval, or was there before this process.
    grown = {uid: count - last.stored[uid] for uid, count in now.stored.items() if uid in last.stored}
    taken = {bound: count - last.chat.get(bound, 0.0) for bound, count in now.chat.items()}
    requests = max(taken.values(), default=0.0)
    return {
        "at": int(now.at * 1000),
        "rates": {uid: round(count / seconds, 2) for uid, count in grown.items() if count > 0},
        "chat_rate": round(requests / seconds, 3),
        "chat_median": quantile(taken, 0.5),
        "chat_p95": quantile(taken, 0.95),
    }


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return a quantile in seconds, as Prometheus' histogram_quantile estimates it; None without a request.

    Above the largest bound that is not infinite, it is that bound.
    """
    ordered = [(0.0, 0.0), *sorted(buckets.items())]
    wanted = ordered[-1][1] * share
    if wanted <= 0:
        return None
    for (low, before), (high, until) in pairwise(ordered):
        if until >= wanted:
            if high == float("inf"):
                return low
            return round(low + (high - low) * (wanted - before) / (until - before), 4)
    return None


def chat_buckets() -> Buckets:
    """Return what this process has counted of chat: the time until an answer begins that is no error."""
    samples = (sample for family in HTTP_SECONDS.collect() for sample in family.samples)
    return dict(_buckets(samples))


def _buckets(samples: Iterable[Any]) -> Iterable[tuple[float, float]]:
    for sample in samples:
        labels = sample.labels
        if sample.name.endswith("_bucket") and _CHAT.items() <= labels.items():
            yield float(labels["le"]), sample.value
