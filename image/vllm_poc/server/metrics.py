# SPDX-License-Identifier: Apache-2.0
"""The series ``poc_*`` on vLLM's ``/metrics``.

Plain instruments on the default registry, with gauges set when ``/metrics`` is asked for: a collector that looks things
up would not be seen where PROMETHEUS_MULTIPROC_DIR is set, since vLLM then answers from the instruments' files alone.
"""

from typing import Generic, Literal, TypeVar, get_args

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from vllm_poc.wire.answers import Activity, PowState
from vllm_poc.wire.messages import Protocol

#: What nonces are computed for: a round, or POST generate and validate.
Work = Literal["round", "request"]
#: Whether PoC runs on this server, or why not.
Readiness = Literal["Ready", "Starting", "ModelUnsupported", "EngineFailed", "NoMemory", "Paused", "Ending"]
READINESS: tuple[Readiness, ...] = get_args(Readiness)

_SLICE_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 30)

Instrument = TypeVar("Instrument", bound=MetricWrapperBase)


class OfModel(Generic[Instrument]):
    """An instrument whose series have the label ``model_name``, as vLLM's own have, beside other labels."""

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument

    def labels(self, *values: str) -> Instrument:
        """Return the series with these values of the other labels."""
        return self._instrument.labels(_model.name, *values)


class _Model:
    name = ""  # until the server knows it


_model = _Model()


def _counter(name: str, meaning: str, *labels: str) -> OfModel[Counter]:
    return OfModel(Counter(name, meaning, ["model_name", *labels]))


def _gauge(name: str, meaning: str, *labels: str) -> OfModel[Gauge]:
    # Without a mode the multiprocess files would give each gauge a label for the process.
    return OfModel(Gauge(name, meaning, ["model_name", *labels], multiprocess_mode="mostrecent"))


COMPUTED = _counter("poc_nonces_computed", "Nonces computed, those that are not finite included", "protocol", "work")
NOT_FINITE = _counter("poc_nonces_not_finite", "Nonces that stayed NaN or infinite", "protocol", "work")
VALID = _counter("poc_nonces_valid", "Valid nonces of rounds", "protocol")
DELIVERED = _counter("poc_results_delivered", "Results of rounds that are delivered")
REJECTED = _counter("poc_results_rejected", "Results of rounds that the receiver refused for good")
CALLBACKS = _counter("poc_callbacks", "Callback requests by outcome; those that failed are tried again", "outcome")
CALLBACKS_LOST = _counter("poc_callbacks_lost", "Callbacks outside of rounds, rejected even in part or given up")
HELD_BACK = _counter("poc_held_back_seconds", "Time that chat held PoC back")
SLICE = OfModel(
    Histogram(
        "poc_slice_seconds",
        "Time of a slice, or of a part of one, from call to answer",
        ["model_name"],
        buckets=_SLICE_BUCKETS,
    )
)
PROGRESS = _gauge(
    "poc_last_progress_timestamp_seconds",
    "Unix time when the workers last began or ended a call, or of a later round's start",
)
READY = _gauge("poc_ready", "1 for whether PoC runs on this server, or why not, 0 for the others", "reason")
FUSED = _gauge("poc_fused_pass", "1 if PoC computes by fused operations, 0 if not or as long as that is not known")
STATE = _gauge("poc_state", "1 for the server's state, 0 for the others", "state")
ACTIVITY = _gauge("poc_activity", "1 for what a round that generates does, 0 for the others", "activity")
PENDING = _gauge("poc_results_pending", "Results of the round that wait for delivery")
QUEUED_JOBS = _gauge("poc_queued_jobs", "Requests for named nonces that wait or are computed")
QUEUED_NONCES = _gauge("poc_queued_nonces", "Nonces of these requests")


def count_nonces(protocol: Protocol, work: Work, *, computed: int, not_finite: int) -> None:
    """Count the nonces of a slice; ``not_finite`` is part of ``computed``."""
    COMPUTED.labels(protocol, work).inc(computed)
    NOT_FINITE.labels(protocol, work).inc(not_finite)


def begin(model_name: str) -> None:
    """Let all series be about this model, and begin at 0.

    A series that appears with its first event hides that event from rate().
    """
    _model.name = model_name
    for protocol in Protocol:
        VALID.labels(protocol)
        count_nonces(protocol, "round", computed=0, not_finite=0)
        count_nonces(protocol, "request", computed=0, not_finite=0)
    for outcome in ("accepted", "refused", "failed"):
        CALLBACKS.labels(outcome)
    for counter in (DELIVERED, REJECTED, CALLBACKS_LOST, HELD_BACK):
        counter.labels()
    SLICE.labels()
    for gauge in (PROGRESS, FUSED, PENDING, QUEUED_JOBS, QUEUED_NONCES):
        gauge.labels()
    set_ready("Starting")
    set_state(PowState.IDLE, None)


def set_ready(reason: Readiness) -> None:
    """Tell whether PoC runs on this server, or why not."""
    for one in READINESS:
        READY.labels(one).set(one == reason)


def set_state(state: PowState, activity: Activity | None) -> None:
    """Tell the state, and what a round does that generates."""
    for one in PowState:
        STATE.labels(one).set(one is state)
    for other in Activity:
        ACTIVITY.labels(other).set(other is activity)
