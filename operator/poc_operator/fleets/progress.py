# SPDX-License-Identifier: Apache-2.0
"""Whether a pod's engine gets anything done, as its ``/metrics`` tell at several looks.

A hung engine leaves a server that answers: its counters stand still while requests or nonces wait. Load alone is no
hang. A long prefill fills the KV cache, chat that holds PoC back is counted, and an engine that sleeps or is paused
says so.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Series of vLLM of which at least one changes with every step of the engine.
_STEPS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
_QUEUES = _STEPS[:2]
#: Without it the server keeps its counters to itself, and nothing can be said of chat.
_TOKENS = "vllm:generation_tokens_total"
_COMPUTED = "poc_nonces_computed_total"
_HELD_BACK = "poc_held_back_seconds_total"
_QUEUED = "poc_queued_nonces"
_ACTIVITY = "poc_activity"
_READY = "poc_ready"
#: All series that are read.
SERIES = (*_STEPS, _COMPUTED, _HELD_BACK, _QUEUED, _ACTIVITY, _READY)
#: Words of ``poc_ready`` for an engine that rests since somebody told it to.
_RESTS = frozenset({"Paused", "Ending"})

_LINE = re.compile(r"([a-z:_]+)(?:\{(.*)\})? +(\S+)(?: +-?\d+)?", re.ASCII)
_WORD = re.compile(r'(?:activity|reason)="(\w+)"', re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Whether work waits, and counters that change whenever some of it is done. ``what`` names the work."""

    waits: bool = False
    mark: tuple[float, ...] = ()
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a server told at one time. ``at`` is in seconds of any monotonic clock, ``server`` the container's id."""

    at: float
    server: str
    chat: Work = Work()
    poc: Work = Work()


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The newest look at a pod, and since when its work waits without progress. ``answers`` is False after a look
    that brought nothing; what was seen before it counts on as soon as the pod answers again."""

    look: Look
    chat_since: float
    poc_since: float
    answers: bool = True


def parse_look(text: str, *, at: float, server: str) -> Look:
    """Return what an exposition of metrics tells. Of a server that has no PoC it is that nothing waits."""
    sums, words = _read(text)
    if _READY not in words or words[_READY] & _RESTS:
        return Look(at=at, server=server)
    steps = tuple(sums.get(name, -1.0) for name in _STEPS)
    running, waiting = (sums.get(name, 0.0) for name in _QUEUES)
    computed, queued = sums.get(_COMPUTED, 0.0), sums.get(_QUEUED, 0.0)
    activity = words.get(_ACTIVITY, frozenset())
    # PoC's nonces are steps of the engine too: with PoC first, chat waits for them.
    chat = Work(
        waits=_TOKENS in sums and (running + waiting > 0 or "HeldByChat" in activity),
        mark=(*steps, computed),
        what=f"{running:.0f} requests run and {waiting:.0f} wait",
    )
    poc = Work(
        waits="Computing" in activity or (queued > 0 and not activity),
        mark=(computed, sums.get(_HELD_BACK, 0.0)),
        what="nonces are to be computed",
    )
    return Look(at=at, server=server, chat=chat, poc=poc)


def _read(text: str) -> tuple[Mapping[str, float], Mapping[str, frozenset[str]]]:
    """Return the sums of the series, and the words whose series are 1."""
    sums, words = defaultdict[str, float](float), defaultdict[str, frozenset[str]](frozenset)
    for line in text.splitlines():
        match = _LINE.fullmatch(line) if line.startswith(SERIES) else None
        if match is None or match[1] not in SERIES:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        sums[match[1]] += value
        if match[1] in (_ACTIVITY, _READY):
            words[match[1]] |= set(_WORD.findall(match[2] or "")) if value == 1 else set()
    return sums, words


def watched(before: Watched | None, look: Look | None) -> Watched | None:
    """Return what is known of a pod after another look; None as long as there was none that brought anything."""
    if look is None:
        return replace(before, answers=False) if before is not None else None
    if before is None or before.look.server != look.server:
        return Watched(look=look, chat_since=look.at, poc_since=look.at)
    last = before.look
    return Watched(
        look=look,
        chat_since=before.chat_since if _stands(last.chat, look.chat) else look.at,
        poc_since=before.poc_since if _stands(last.poc, look.poc) else look.at,
    )


def _stands(before: Work, now: Work) -> bool:
    return before.waits and now.waits and before.mark == now.mark


def hung(found: Watched | None, seconds: int) -> str | None:
    """Say what has not got on for so many seconds although it waits; None if all does."""
    if found is None or not found.answers:
        return None
    for work, since in ((found.look.chat, found.chat_since), (found.look.poc, found.poc_since)):
        if work.waits and found.look.at - since >= seconds:
            return f"{work.what}, and nothing was done for {found.look.at - since:.0f} s"
    return None
