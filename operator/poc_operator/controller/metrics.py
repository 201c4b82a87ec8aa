# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the operator, and the port that they are read from.

No label names a round or a pod, so their number is bounded. Counters of nonces count each round's progress beyond
what was reached before: a new process begins with what the status says, and nonces that are computed anew after a
loss are not counted twice.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from poc_operator.apis.v1alpha1.calibration import CalibrationStatus
from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import FleetStatus, PoCFleet
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound, RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState, State, WorkStatus
from poc_operator.apis.v1alpha1.validation import ValidationStatus
from poc_operator.controller.health import served
from poc_operator.planning.eligibility import loads
from poc_operator.planning.reaping import Cause
from poc_operator.planning.snapshot import Snapshot, Work, WorkEvent

_POLL_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 5, 10)
_LAG_BUCKETS = (0.003, 0.01, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 1, 3, 10)
_PLAN_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_NONCES = ("checked", "valid", "delivered")
_UNDER_WAY = {State.PENDING, State.RUNNING}
#: Reasons that there can be: for which a round waits, work is degraded, and a fleet is degraded or stalled.
_WAITING = [
    str(reason)
    for reason, one in EXPLANATIONS.items()
    if "Progressing" in one.where and PoCRound.KIND.kind in one.kinds
]
_DEGRADED = [
    str(reason)
    for reason, one in EXPLANATIONS.items()
    if "Degraded=True" in one.where and one.kinds != {PoCFleet.KIND.kind}
]
#: Reasons for which a round can fail, but for its deletion.
_FAILURES = [
    str(reason)
    for reason, one in EXPLANATIONS.items()
    if "Failed=True" in one.where and PoCRound.KIND.kind in one.kinds and reason is not Reason.DELETED
]
_TROUBLES = [
    str(reason)
    for reason, one in EXPLANATIONS.items()
    if ("Degraded" in one.where or "Stalled=True" in one.where) and PoCFleet.KIND.kind in one.kinds
]


@dataclass
class _Known:
    kind: str
    status: WorkStatus
    most: Mapping[str, int]
    silent: float
    seen: float
    #: Why no pod works on it, although the pods have had their time to load; empty if one does.
    idle: str


def _nonces(status: WorkStatus) -> Mapping[str, int]:
    """Return how many nonces are done; for nonces that are checked, valid ones match and have a finite result."""
    if isinstance(status, RoundStatus):
        return {name: getattr(status.totals, name) for name in _NONCES}
    checked = status.checked if isinstance(status, ValidationStatus | CalibrationStatus) else 0
    bad = status.not_computed if isinstance(status, ValidationStatus | CalibrationStatus) else 0
    mismatches = status.mismatches if isinstance(status, ValidationStatus) else 0
    return {"checked": checked, "valid": checked - bad - mismatches, "delivered": checked}


class Metrics(Collector):
    """What the operator counts and measures; also the collector of what its objects are doing now."""

    def __init__(self, leads: Callable[[], bool] = lambda: False) -> None:
        """``leads`` tells whether this process holds the Lease, and may act."""
        self._leads = leads
        self._registry = CollectorRegistry()
        self._known: dict[str, _Known] = {}
        self._fleets: dict[str, FleetStatus] = {}
        registry = self._registry
        self._nonces = {
            name: CounterMetric(f"poc_operator_nonces_{name}", f"Nonces {name}.", registry=registry) for name in _NONCES
        }
        self._retries = CounterMetric("poc_operator_retries", "Slots given out again.", ["cause"], registry=registry)
        self._failed = CounterMetric(
            "poc_operator_failed_rounds", "Rounds that have failed, by reason.", ["reason"], registry=registry
        )
        for reason in _FAILURES:
            self._failed.labels(reason)  # an increase is seen of what was there before
        self._events = CounterMetric("poc_operator_events", "Events on objects.", ["reason"], registry=registry)
        self.poll_seconds = Histogram(
            "poc_operator_poll_seconds", "One poll of all pods of an object.", buckets=_POLL_BUCKETS, registry=registry
        )
        self.plan_seconds = Histogram(
            "poc_operator_plan_seconds", "One plan.", buckets=_PLAN_BUCKETS, registry=registry
        )
        self.loop_lag = Histogram(
            "poc_operator_loop_lag_seconds",
            "How late the event loop comes to what is due.",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        self._poll_errors = CounterMetric(
            "poc_operator_poll_errors", "Pods that did not answer a poll as they should.", ["kind"], registry=registry
        )
        self._work_errors = CounterMetric(
            "poc_operator_internal_errors", "Failures of the operator on an object.", ["kind"], registry=registry
        )
        self._store_errors = CounterMetric(
            "poc_operator_api_server_errors", "Failed requests to the API server.", ["kind"], registry=registry
        )
        self._orphans = CounterMetric(
            "poc_operator_orphans_stopped",
            "Pods stopped that computed what nobody needs.",
            ["cause"],
            registry=registry,
        )
        registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def poll_failed(self, error: Exception) -> None:
        """Count a pod that did not answer a poll as it should."""
        self._poll_errors.labels(type(error).__name__).inc()

    def work_failed(self, error: Exception) -> None:
        """Count a failure of the operator on an object."""
        self._work_errors.labels(type(error).__name__).inc()

    def orphan_stopped(self, cause: Cause) -> None:
        """Count a pod whose work was stopped since nobody needs it."""
        self._orphans.labels(cause).inc()

    def api_server_failed(self, error: Exception) -> None:
        """Count a failed request to the API server."""
        self._store_errors.labels(type(error).__name__).inc()

    def planned(self, seen: Snapshot[Work], status: WorkStatus, events: Iterable[WorkEvent]) -> None:
        """Count what a recorded plan brought."""
        for event in events:
            self._events.labels(event.reason).inc()
            if event.loss is not None:
                self._retries.labels(event.loss).inc(event.count)
        if isinstance(status, RoundStatus) and _has_failed(status) and not _has_failed(seen.work.status):
            self._failed.labels(status.outcome.reason if status.outcome is not None else "").inc()
        uid = seen.work.metadata.uid
        most = self._known[uid].most if uid in self._known else _nonces(seen.work.status)
        silent = [seen.report_of(share).silent_seconds for share in status.shares if share.state.active]
        self._known[uid] = _Known(
            kind=seen.work.KIND.plural.removeprefix("poc"),
            status=status,
            most=self._count(most, _nonces(status)),
            silent=max(silent, default=0.0),
            seen=monotonic(),
            idle=_idle_for(seen, status),
        )

    def fleet_planned(self, uid: str, status: FleetStatus) -> None:
        """Remember how a fleet is."""
        self._fleets[uid] = status

    def forget(self, uid: str) -> None:
        """Forget an object that is finished or deleted."""
        self._known.pop(uid, None)
        self._fleets.pop(uid, None)

    def _count(self, most: Mapping[str, int], now: Mapping[str, int]) -> Mapping[str, int]:
        gains = {name: max(0, now[name] - most[name]) for name in _NONCES}
        for name, gain in gains.items():
            self._nonces[name].inc(gain)
        return {name: most[name] + gain for name, gain in gains.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield what the objects that are being reconciled do now."""
        yield GaugeMetricFamily(
            "poc_operator_leader", "Whether this operator holds the Lease, and acts.", value=float(self._leads())
        )
        yield _fleets_in_trouble(self._fleets.values())
        known = list(self._known.values())
        for kind in ("rounds", "validations", "calibrations"):
            states = Counter(str(one.status.state) for one in known if one.kind == kind)
            yield _gauge(f"poc_operator_{kind}", f"{kind.capitalize()} that are being reconciled.", states, State)
        rounds = [one.status for one in known if isinstance(one.status, RoundStatus)]
        slots = Counter(str(slot.state) for status in rounds for slot in status.assignments)
        yield _gauge("poc_operator_slots", "Slots of the rounds that are being reconciled.", slots, SlotState)
        idle = Counter(one.idle for one in known if one.kind == "rounds")
        yield _by_reason("poc_operator_idle_rounds", "Rounds on which no pod works, by reason.", idle, _WAITING)
        working = [one for one in known if any(share.state.active for share in one.status.shares)]
        oldest = max((one.silent + monotonic() - one.seen for one in working), default=0.0)
        yield GaugeMetricFamily(
            "poc_operator_oldest_report_seconds", "Age of the oldest report of a pod that has a slot.", value=oldest
        )
        yield _degraded(one.status for one in known)
        checks = [status.cross_check for status in rounds]
        deviating = sum(check.deviating_pods for check in checks if check is not None)
        yield GaugeMetricFamily(
            "poc_operator_pods_deviating",
            "Pods that computed something else than most of their round.",
            value=deviating,
        )


def _has_failed(status: WorkStatus) -> bool:
    """Whether it is over, and has failed; that it is deleted is no failure."""
    return status.state is State.FAILED and status.outcome is not None and status.outcome.reason != Reason.DELETED


def _idle_for(seen: Snapshot[Work], status: WorkStatus) -> str:
    """Return why no pod works on it; empty if one does, while others have the pods, and while all pods still load."""
    pods = seen.live_pods
    if status.idle_time is None or status.state not in _UNDER_WAY or (pods and all(loads(seen, pod) for pod in pods)):
        return ""
    return next((one.reason for one in status.own_conditions if one.type == ConditionType.PROGRESSING), "")


def _degraded(statuses: Iterable[WorkStatus]) -> GaugeMetricFamily:
    found = Counter(reason for status in statuses for reason in status.degraded.split(",") if reason)
    return _by_reason("poc_operator_degraded", "Objects that are degraded, by reason.", found, _DEGRADED)


def _fleets_in_trouble(statuses: Iterable[FleetStatus]) -> GaugeMetricFamily:
    found = Counter(reason for status in statuses for reason in _troubles(status))
    text = "Fleets that are degraded or stalled, by reason."
    return _by_reason("poc_operator_fleets_degraded", text, found, _TROUBLES)


def _troubles(status: FleetStatus) -> set[str]:
    conditions = (status.own_conditions.get(kind) for kind in (ConditionType.DEGRADED, ConditionType.STALLED))
    return {found.reason for found in conditions if found is not None and found.status == "True"}


def _by_reason(name: str, text: str, counts: Mapping[str, int], reasons: Iterable[str]) -> GaugeMetricFamily:
    """Return how many there are for each of the reasons that there can be."""
    gauge = GaugeMetricFamily(name, text, labels=["reason"])
    for reason in reasons:
        gauge.add_metric([reason], counts.get(reason, 0))
    return gauge


def _gauge(name: str, text: str, counts: Mapping[str, int], states: Iterable[str]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=["state"])
    for state in states:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge


@asynccontextmanager
async def serve_metrics(metrics: Metrics, port: int, *, host: str | None = None) -> AsyncIterator[None]:
    """Serve ``GET /metrics`` until the block ends. OSError if the port is taken."""

    def answer() -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async with served("/metrics", answer, host, port):
        yield
