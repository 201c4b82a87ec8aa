# SPDX-License-Identifier: Apache-2.0
"""For each alert, series that let it fire and series that must not.

Samples are 30 s apart, as the chart scrapes. The fault begins after the eleventh, at 5 min; ``1x10`` is eleven times 1.
"""

from dataclasses import dataclass, field

#: Series, as promtool writes them, and their samples.
Series = dict[str, str]

_OF = 'namespace="poc-system", pod="a"'
_POD = 'namespace="poc", pod="qwen-0", model_name="qwen"'


@dataclass(frozen=True)
class Case:
    """When an alert fires, and when it must not. ``minutes`` is when one looks, 3 after the fault by default."""

    fires: list[Series]
    silent: list[Series]
    minutes: int = 8


def _operator(name: str, samples: str, **labels: str) -> Series:
    return _series("poc_operator_" + name, _OF, samples, labels)


def _gateway(name: str, samples: str, **labels: str) -> Series:
    return _series("poc_gateway_" + name, _OF, samples, labels)


def _pod(name: str, samples: str, **labels: str) -> Series:
    return _series("poc_" + name, _POD, samples, labels)


def _series(name: str, base: str, samples: str, labels: dict[str, str]) -> Series:
    own = [f'{key}="{value}"' for key, value in labels.items()]
    return {f"{name}{{{', '.join([base, *own])}}}": samples}


_LATER, _FLAT = "0x10 1x60", "0x70"
_STOPS = "0+30x10 300x60"
_HUNG = _pod("last_progress_timestamp_seconds", _STOPS)
#: A round that has a pod, whose chat lets it compute nothing.
_HELD = (
    _pod("activity", "0x70", activity="Computing")
    | _pod("activity", "1x70", activity="HeldByChat")
    | _pod("ready", "1x70", reason="Ready")
    | _pod("callbacks_total", "5x70", outcome="accepted")
    | _pod("callbacks_total", "0x70", outcome="failed")
    | _HUNG
    | _operator("leader", "1x70")
    | _operator("rounds", "1x70", state="Running")
    | _operator("rounds", "1x70", state="Pending")
    | _operator("slots", "1x70", state="Running")
    | _operator("idle_rounds", "0x70", reason="NoPodReady")
    | _operator("nonces_checked_total", "100x70")
    | _operator("oldest_report_seconds", "5x70")
    | _operator("degraded", "0x70", reason="SlotsStalled")
)

CASES: dict[str, Case] = {
    "PoCOperatorAbsent": Case(
        [_operator("leader", "1x10 stale"), _operator("leader", "1x10 0x60")], [_operator("leader", "1x70")]
    ),
    "PoCOperatorFailing": Case(
        [_operator("internal_errors_total", "0x10 1 2 3 4x60", kind="KeyError")],
        [_operator("internal_errors_total", _LATER, kind="KeyError")],
    ),
    "PoCOperatorRequestsFail": Case(
        [_operator("api_server_errors_total", "0x10 0+2x60", kind="StoreForbidden")],
        [
            _operator("api_server_errors_total", _LATER, kind="StoreForbidden"),
            _operator("api_server_errors_total", "0x10 0+2x60", kind="StaleObject"),
        ],
        minutes=12,
    ),
    "PoCRoundsIdle": Case(
        # Also while the other rounds of the operator have all the pods they want.
        [
            _operator("idle_rounds", _LATER, reason=reason) | _operator("slots", "8x70", state="Running")
            for reason in ("NoPodReady", "NoMatchingPods", "PodsUnreachable", "RequestRefused")
        ]
        # A pod that comes up, does not answer and is restarted, again and again.
        + [
            _operator("idle_rounds", "0x10 " + "1x2 0x2 " * 10, reason="NoPodReady")
            | _operator("idle_rounds", "0x10 " + "0x2 1x2 " * 10, reason="PodsUnreachable")
        ],
        [
            _operator("idle_rounds", _FLAT, reason="NoPodReady") | _operator("rounds", "1x70", state="Pending"),
            # Pods that were told to start confirm it a moment later; the next round may begin then.
            _operator("idle_rounds", _LATER, reason="Starting"),
            _operator("idle_rounds", "0x10 1x1 0x60", reason="NoPodReady"),
        ],
    ),
    "PoCReportsOld": Case(
        [_operator("oldest_report_seconds", "5x10 5+30x60")], [_operator("oldest_report_seconds", "40x70")]
    ),
    "PoCWorkDegraded": Case(
        [
            _operator("degraded", _LATER, reason=reason)
            for reason in ("GatewayUnreachable", "PodsDisagree", "RoundFull", "SlotsFailed", "SlotsStalled")
        ]
        # The operator tells of it a minute after the fault.
        + [_operator("degraded", "0x12 1x60", reason="DeliveriesFailing")],
        [
            _operator("degraded", _LATER, reason="SlotsWaiting"),
            _operator("degraded", _LATER, reason="DeliveryIncomplete"),
            _operator("degraded", "0x10 1 0x60", reason="GatewayUnreachable"),
            # A receiver that was away for a minute, and takes results again with the next try.
            _operator("degraded", "0x14 1x1 0x60", reason="DeliveriesFailing"),
        ],
    ),
    "PoCRoundFailed": Case(
        [
            _operator("failed_rounds_total", _LATER, reason="BackoffLimitExceeded"),
            # An operator that came back and found a round whose time was over.
            _operator("failed_rounds_total", "_x11 1x60", reason="PodsIdle"),
        ],
        [
            _operator("failed_rounds_total", "0x70", reason="BackoffLimitExceeded"),
            _operator("failed_rounds_total", _LATER, reason="DeadlineExceeded"),
            _operator("failed_rounds_total", "_x11 1x60", reason="PodsBusy"),
        ],
    ),
    "PoCWorkImpaired": Case(
        [_operator("degraded", _LATER, reason="SlotsWaiting")],
        [_operator("degraded", "0x10 1x10 0x50", reason="SlotsWaiting")],
        minutes=25,
    ),
    "PoCFleetDegraded": Case(
        [_operator("fleets_degraded", _LATER, reason="GpuFaulty")],
        [_operator("fleets_degraded", "0x70", reason="GpuFaulty")],
    ),
    "PoCGatewayAbsent": Case(
        [_gateway("owner", "1x10 stale"), _gateway("owner", "1x10 0x60")],
        [_gateway("owner", "1x70") | {'poc_gateway_owner{namespace="poc-system", pod="b"}': "0x70"}],
    ),
    "PoCGatewayDatabaseUnavailable": Case(
        [_gateway("http_refusals_total", "0x10 0+5x60", reason="DatabaseUnavailable")],
        [_gateway("http_refusals_total", _LATER, reason="DatabaseUnavailable")],
    ),
    "PoCGatewayDiskFull": Case([_gateway("disk_full", _LATER)], [_gateway("disk_full", _FLAT)]),
    "PoCGatewayDiskFilling": Case(
        [
            _gateway("volume_bytes", "100x90") | _gateway("volume_free_bytes", "40x10 8x80"),
            _gateway("volume_bytes", "100x90") | _gateway("volume_free_bytes", "49-0.2x90"),
        ],
        [
            _gateway("volume_bytes", "100x90") | _gateway("volume_free_bytes", "40x90"),
            _gateway("volume_bytes", "100x90") | _gateway("volume_free_bytes", "99-0.2x90"),
        ],
        minutes=30,
    ),
    "PoCReceiverUnreachable": Case(
        [
            _gateway("oldest_undelivered_seconds", "1x10 0+30x60")
            | _gateway("forward_failures_total", "0x10 0+1x60", kind="connection")
        ],
        [
            _gateway("oldest_undelivered_seconds", "1x10 0+30x60")
            | _gateway("forward_failures_total", _FLAT, kind="connection"),
            _gateway("oldest_undelivered_seconds", "20x70")
            | _gateway("forward_failures_total", "0x10 0+1x60", kind="connection"),
        ],
    ),
    "PoCDeliveriesLate": Case(
        [_gateway("oldest_undelivered_seconds", "0x10 2000x60")],
        [_gateway("oldest_undelivered_seconds", "0x10 1000x60")],
        minutes=15,
    ),
    "PoCDeliveriesLost": Case(
        [
            _gateway("dead_total", _LATER, content="artifact") | _gateway("expired_total", _FLAT, content="artifact"),
            _gateway("dead_total", _FLAT, content="callback") | _gateway("expired_total", _LATER, content="callback"),
        ],
        [_gateway("dead_total", _FLAT, content="artifact") | _gateway("expired_total", _FLAT, content="artifact")],
    ),
    "PoCGatewayUnauthorized": Case(
        [_gateway("http_refusals_total", "0x10 0+3x60", reason="Unauthorized")],
        [_gateway("http_refusals_total", _LATER, reason="Unauthorized")],
    ),
    "PoCGatewayOverloaded": Case(
        [_gateway("http_refusals_total", "0x10 0+30x60", reason="Busy")],
        [_gateway("http_refusals_total", "0x10 3x60", reason="Busy")],
        minutes=15,
    ),
    "PoCGatewayErrors": Case(
        [
            _gateway("http_requests_total", "0x10 0+5x60", port="network", route="/api/v1/state", status="500")
            | _gateway("http_requests_total", "0+10x70", port="network", route="/health", status="200")
        ],
        [
            _gateway("http_requests_total", "0x10 0+5x60", port="network", route="/v1/{path}", status="502")
            | _gateway("http_requests_total", "0+10x70", port="network", route="/health", status="200")
        ],
        minutes=15,
    ),
    "PoCGatewayCertificateExpires": Case(
        [
            _gateway("certificate_expiration_timestamp_seconds", "605100x70", port="network"),
            # Replaced by one that is valid for a shorter time.
            _gateway("certificate_expiration_timestamp_seconds", "900000x10 5000x60", port="network"),
        ],
        [
            _gateway("certificate_expiration_timestamp_seconds", "900000x70", port="network"),
            # Renewed in time, and expired, which is the other alert's.
            _gateway("certificate_expiration_timestamp_seconds", "5000x10 900000x60", port="network"),
            _gateway("certificate_expiration_timestamp_seconds", "10x70", port="network"),
        ],
        minutes=12,
    ),
    "PoCGatewayCertificateExpired": Case(
        [_gateway("certificate_expiration_timestamp_seconds", "300x70", port="network")],
        [
            _gateway("certificate_expiration_timestamp_seconds", "5000x70", port="network"),
            _gateway("certificate_expiration_timestamp_seconds", "300x10 900000x60", port="network"),
            _gateway("database_bytes", "5x70"),  # no TLS, no series
        ],
    ),
    "PoCArchiveFailing": Case(
        [_gateway("archive_failures_total", "0x10 0+1x60") | _gateway("archive_waiting_rounds", "2x70")],
        [_gateway("archive_failures_total", _LATER) | _gateway("archive_waiting_rounds", _FLAT)],
        minutes=25,
    ),
    "PoCPodNotReady": Case(
        [_pod("ready", _LATER, reason=reason) for reason in ("EngineFailed", "ModelUnsupported", "NoMemory")],
        [_pod("ready", _LATER, reason=reason) for reason in ("Ready", "Starting", "Paused", "Ending")],
    ),
    "PoCPodHung": Case(
        [_HUNG | _pod("activity", "1x70", activity="Computing")],
        [
            _HUNG | _pod("activity", "0x70", activity="Computing"),
            _pod("last_progress_timestamp_seconds", "0+30x70") | _pod("activity", "1x70", activity="Computing"),
        ],
    ),
    "PoCPodCannotDeliver": Case(
        [
            _pod("callbacks_total", "0x10 0+2x60", outcome="failed")
            | _pod("callbacks_total", "0+1x10 10x60", outcome="accepted")
        ],
        [
            _pod("callbacks_total", "0x10 0+2x60", outcome="failed")
            | _pod("callbacks_total", "0+1x70", outcome="accepted")
        ],
    ),
}


@dataclass(frozen=True)
class Quiet:
    """Series under which none of the alerts in ``but`` may fire: what is normal."""

    series: Series = field(default_factory=lambda: dict(_HELD))
    but: tuple[str, ...] = ("PoCGatewayAbsent",)  # the series have no gateway
