# SPDX-License-Identifier: Apache-2.0
"""What chat and PoC did to each other, in figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import inf
from statistics import mean, stdev
from typing import Any

from benchmarks.chat_load import Streamed
from benchmarks.figures import quantile

#: Hoped for on an H200 with the shape of Qwen3-0.6B and the settings that users have.
MOST_ADDED_SECONDS = 0.04
LEAST_SHARE = 0.85
MOST_LOSS = 0.03


@dataclass
class Nonces:
    """Nonces computed, and in how many seconds."""

    count: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Nonces per second."""
        return self.count / self.seconds if self.seconds else 0.0

    def share_of(self, other: Nonces) -> float:
        """Return this rate as a share of another one; 0 if there is none."""
        return self.rate / other.rate if other.rate else 0.0

    def add(self, count: int, seconds: float) -> None:
        """Count more."""
        self.count += count
        self.seconds += seconds


@dataclass
class Side:
    """Chat on an idle server, or beside PoC: what came of each half, and of each turn of so many clients.

    ``rates`` are in tokens per second.
    """

    chats: list[list[Streamed]] = field(default_factory=list)
    rates: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    client_share: float = 0.0  # of a core that the clients took, at the most


@dataclass
class Answers:
    """How many answers were compared, and how many of them were others beside PoC."""

    compared: int = 0
    changed: int = 0


@dataclass
class Measured:
    """All that is measured."""

    idle: Side = field(default_factory=Side)
    beside: Side = field(default_factory=Side)
    alone: Nonces = field(default_factory=Nonces)
    between: Nonces = field(default_factory=Nonces)  # the seconds are those in which no chat ran
    not_held: Nonces = field(default_factory=Nonces)  # the same nonces; the seconds are those that chat left to PoC
    meanwhile: Nonces = field(default_factory=Nonces)  # beside clients that chat without pause
    answers: Answers = field(default_factory=Answers)

    def figures(self) -> dict[str, Any]:
        """Return all figures, in seconds, nonces and tokens."""
        idle, beside = _first_token(self.idle.chats), _first_token(self.beside.chats)
        return {
            "first_token": {"idle": idle, "beside": beside, "added_p99": beside["p99"] - idle["p99"]},
            "nonces": {
                "alone": self.alone.rate,
                "between_chats": self.between.rate,
                "share": self.between.share_of(self.alone),
                "not_held_back": self.not_held.rate,
                "share_not_held_back": self.not_held.share_of(self.alone),
                "seconds_between_chats": self.between.seconds,
                "beside_clients": self.meanwhile.rate,
                "share_beside_clients": self.meanwhile.share_of(self.alone),
            },
            "tokens": {
                clients: _rates(rates, self.beside.rates[clients]) for clients, rates in self.idle.rates.items()
            },
            "answers": asdict(self.answers),
            "client": {
                "latest_send": max(chat.sent - chat.due for chat in chain(*self.idle.chats, *self.beside.chats)),
                "share_of_a_core": max(self.idle.client_share, self.beside.client_share),
            },
        }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text, each beside what is hoped for."""
    first, nonces, client = figures["first_token"], figures["nonces"], figures["client"]
    lines = [
        _times("idle", first["idle"]),
        _times("beside PoC", first["beside"]),
        f"  p99 beside PoC: {1e3 * first['added_p99']:+.1f} ms (hoped for: at most +{1e3 * MOST_ADDED_SECONDS:.0f} ms)",
        f"PoC alone: {nonces['alone']:.1f} nonces/s; between chats: {nonces['between_chats']:.1f} nonces/s, "
        f"in {nonces['seconds_between_chats']:.1f} s without any",
        f"  share: {nonces['share']:.1%} (at least {LEAST_SHARE:.0%}), with its work while a chat already waits",
        f"  while it was not held back: {nonces['not_held_back']:.1f} nonces/s, {nonces['share_not_held_back']:.1%}",
    ]
    for clients, rates in figures["tokens"].items():
        lines += [
            f"{clients} clients without pause: {rates['idle']:.0f} tokens/s idle, {rates['beside']:.0f} beside PoC",
            f"  loss: {rates['loss']:.1%} (at most {MOST_LOSS:.0%}), give or take {rates['error']:.1%}",
        ]
    lines += [
        "{changed} of {compared} answers have other tokens beside PoC".format(**figures["answers"]),
        f"PoC beside such clients: {nonces['beside_clients']:.1f} nonces/s, {nonces['share_beside_clients']:.1%}",
        f"this program sent chats up to {1e3 * client['latest_send']:.1f} ms late, and took up to "
        f"{client['share_of_a_core']:.0%} of a core beside such clients",
    ]
    return "\n".join(lines)


def _rates(idle: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    idle_mean, beside_mean = mean(idle), mean(beside)
    kept = beside_mean / idle_mean
    rest = [(held - kept * free) / idle_mean for free, held in zip(idle, beside, strict=True)]
    return {
        "idle": idle_mean,
        "beside": beside_mean,
        "loss": 1 - kept,
        "error": stdev(rest) / len(rest) ** 0.5 if len(rest) > 1 else inf,  # the ratio's standard error
        "turns": [idle, beside],
    }


def _first_token(halves: Sequence[Sequence[Streamed]]) -> dict[str, Any]:
    by_half = [[chat.first - chat.sent for chat in chats] for chats in halves]
    waits = list(chain(*by_half))
    return {
        "p50": quantile(waits, 0.5),
        "p99": quantile(waits, 0.99),
        "max": max(waits),
        "chats": len(waits),
        "p99_of_halves": [quantile(half, 0.99) for half in by_half],
    }


def _times(what: str, times: dict[str, Any]) -> str:
    milliseconds = "  ".join(f"{name} {1e3 * times[name]:6.1f} ms" for name in ("p50", "p99", "max"))
    return f"time to first token, {what:12}{milliseconds}  of {times['chats']} chats"
