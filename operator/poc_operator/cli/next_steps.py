# SPDX-License-Identifier: Apache-2.0
"""The command to run next for each reason that asks something of the user, and what to do about a receiver's error.

What a reason means, and the remedy in words, stands in ``apis.v1alpha1.explanations``. A command only looks, or says
where the change belongs; nothing that it does is lost by running it twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.planning.waiting import UNAUTHORIZED_EVERYWHERE

_DESCRIBE_POD = "kubectl -n {namespace} describe pod {pod}"
_LOG = "kubectl -n {namespace} logs {pod} --tail=50"
_PREVIOUS = "kubectl -n {namespace} logs {pod} --previous --tail=50"
_EDIT_FLEET = "kubectl -n {namespace} edit pocfleet {fleet}"
_FLEET = "kubectl poc -n {namespace} explain fleet/{fleet}"
_STATUS = "kubectl poc -n {namespace} status"
_GET = "kubectl -n {namespace} get {kind} {name} -o yaml"
_RESULTS = "kubectl poc -n {namespace} round results {name}{gateway}"
_CHECK = "kubectl poc -n {namespace} check"
_SECRETS = "kubectl -n {namespace} get secrets --field-selector type=kubernetes.io/basic-auth"
_PODS = "kubectl -n {namespace} get pods -o wide --show-labels"
_FLEETS = "kubectl -n {namespace} get pocfleets -o wide"
#: The model stands in the command or its arguments, with the names by which it is served.
_SERVED = (
    "kubectl -n {namespace} get pods -l {selector} -o "
    "'custom-columns=NAME:.metadata.name,COMMAND:.spec.containers[*].command,ARGS:.spec.containers[*].args'"
)

#: The next command by reason; the words in braces are those of `Names`.
COMMANDS: Mapping[Reason, str] = {
    Reason.PENDING: _CHECK,
    Reason.FLEET_NOT_FOUND: "kubectl -n {namespace} get pocfleets",
    Reason.IMAGE_MISSING: _EDIT_FLEET,
    Reason.PRESET_UNUSABLE: "kubectl poc fleet presets",
    Reason.GPU_UNKNOWN: "kubectl get nodes -L nvidia.com/gpu.product",
    Reason.GPU_UNSUPPORTED: "kubectl poc fleet presets",
    Reason.DECODE_UNSUPPORTED: _EDIT_FLEET,
    Reason.CACHE_TOO_SMALL: _EDIT_FLEET,
    Reason.POD_TEMPLATE_INVALID: _EDIT_FLEET,
    Reason.OBJECT_CONFLICT: "kubectl -n {namespace} get statefulsets,pods,services,pvc,jobs,networkpolicies",
    Reason.PODS_OF_OTHERS: "kubectl -n {namespace} get pods -l poc.gonka.ai/fleet={fleet} --show-labels",
    Reason.OBJECT_REFUSED: "kubectl -n {namespace} describe pocfleet {fleet}",
    Reason.PODS_FAILING: _DESCRIBE_POD,
    Reason.PODS_UNSCHEDULABLE: "kubectl -n {namespace} get events --field-selector reason=FailedScheduling",
    Reason.DOWNLOAD_FAILED: "kubectl -n {namespace} get jobs,pods -l poc.gonka.ai/fleet={fleet}",
    Reason.POD_HUNG: _LOG,
    Reason.LEADER_WORKER_SET_UNKNOWN: "kubectl get crd leaderworkersets.leaderworkerset.x-k8s.io",
    Reason.POD_MONITOR_UNKNOWN: "kubectl get crd podmonitors.monitoring.coreos.com",
    Reason.GPU_FAULTY: "kubectl -n {namespace} get pod {pod} -o wide",
    Reason.PODS_OUTDATED: "kubectl poc -n {namespace} fleet rollout status {fleet}",
    Reason.UPDATE_FAILED: "kubectl poc -n {namespace} fleet rollout status {fleet}",
    Reason.UPDATE_STOPPED: _DESCRIBE_POD,
    Reason.SELF_CHECK_FAILED: "kubectl -n {namespace} get pocfleet {fleet} -o yaml",
    Reason.NO_MATCHING_PODS: _PODS,
    Reason.NO_POD_READY: _DESCRIBE_POD,
    Reason.PODS_UNREACHABLE: _LOG,
    Reason.PODS_BUSY: _STATUS,
    Reason.MODEL_MISMATCH: _FLEETS,
    Reason.SEQUENCE_TOO_LONG: _GET,
    Reason.K_DIM_TOO_LARGE: _GET,
    Reason.SCHEME_NOT_OFFERED: _GET,
    Reason.MODEL_UNSUPPORTED: _LOG,
    Reason.REQUEST_REFUSED: _LOG,
    Reason.PROOFS_UNAVAILABLE: _GET,
    Reason.CALLBACK_SECRET_UNAVAILABLE: _SECRETS,
    Reason.INTERNAL_ERROR: "kubectl poc -n {namespace} bundle",
    Reason.TOO_MANY_SLOTS: _GET,
    Reason.START_DEADLINE_EXCEEDED: _STATUS,
    Reason.PODS_IDLE: _STATUS,
    Reason.DEADLINE_EXCEEDED: _STATUS,
    Reason.BACKOFF_LIMIT_EXCEEDED: _PREVIOUS,
    Reason.PROOFS_CHANGED: _GET,
    Reason.NOTHING_COMPUTED: _LOG,
    Reason.FRAUD_DETECTED: _GET,
    Reason.SLOTS_FAILED: _PREVIOUS,
    Reason.SLOTS_LEAVING: "kubectl -n {namespace} get pod {pod} -o wide",
    Reason.SLOTS_PAUSED: _LOG,
    Reason.SLOTS_STALLED: _LOG,
    Reason.SLOTS_WAITING: _PODS,
    Reason.PODS_DISAGREE: _LOG,
    Reason.RESULTS_CONFLICT: _RESULTS,
    Reason.RESULTS_FORGED: _RESULTS,
    Reason.DELIVERIES_FAILING: _CHECK,
    Reason.DELIVERIES_REFUSED: _LOG,
    Reason.RECEIVER_FAILING: _RESULTS,
    Reason.ROUND_FULL: _RESULTS,
    Reason.GATEWAY_CONTRADICTORY: _CHECK,
    Reason.GATEWAY_UNREACHABLE: _CHECK,
    Reason.DELIVERY_INCOMPLETE: _RESULTS,
    Reason.RESULTS_REJECTED: _LOG,
    Reason.THEORY_DISAGREES: _FLEETS,
    Reason.STALLED: _LOG,
    Reason.REPORT_CONTRADICTORY: _LOG,
    Reason.PODS_LEFT: _LOG,
    Reason.ORPHAN_STOPPED: _LOG,
}
#: The same where pods are selected by their labels, and no fleet tells of them.
COMMANDS_OF_SELECTORS: Mapping[Reason, str] = {Reason.MODEL_MISMATCH: _SERVED, Reason.THEORY_DISAGREES: _SERVED}


#: What to do about an address to which the gateway does not send, by the variable that its text names. The chart sets
#: these, so that its values are the place.
_ADDRESS_REMEDIES = (
    (
        "POC_GATEWAY_RECEIVER_PRIVATE",
        "If results may be sent there, add the address's range to gateway.receivers.private of the chart's values.",
    ),
    (
        "POC_GATEWAY_RECEIVER_ALLOW",
        "If results may be sent there, add the host to gateway.receivers.allow of the chart's values.",
    ),
)
#: What to do where pods answer, and refuse the token.
_UNAUTHORIZED = (
    "See that operator and pods have the same token. The operator sends that of the Secret which `auth.existingSecret` "
    "of the chart names, in the namespace of the pods. Pods with `VLLM_POC_TOKEN` read theirs only when they start: "
    "restart them after a change."
)
#: What to do about an error of a receiver, by what its text has: the first that fits.
_RECEIVER_REMEDIES = (
    *_ADDRESS_REMEDIES,
    ("certificate", "Renew the receiver's certificate, or correct the host name in its address."),
    ("HTTP 401", "Correct the user and the password in the Secret of callbackSecretRef."),
    (
        "HTTP 403",
        "Correct the user and the password in the Secret of callbackSecretRef, or let the receiver allow them.",
    ),
    ("HTTP 404", "Make a new round with the right callbackURL."),
    ("HTTP 405", "Make a new round with the right callbackURL."),
    ("HTTP 3", "Make a new round with the callbackURL to which the receiver redirects."),
    ("HTTP 4", "Look at the receiver's log: it runs, and refuses what it gets."),
    ("Secret ", "Correct the Secret of callbackSecretRef."),
    (
        "Name or service not known",
        "The cluster's DNS does not know this name: use the IP address in the callback URL, and in "
        "gateway.receivers.allow of the chart's values.",
    ),
    ("HTTP 5", "Look at the receiver's log: it runs, and fails."),
    ("", "Look whether the receiver runs at this address, and whether a NetworkPolicy or a firewall is in the way."),
)


def receiver_remedy(error: str) -> str:
    """Return what to do about why a receiver does not take results."""
    return next(remedy for part, remedy in _RECEIVER_REMEDIES if part in error)


def special_remedy(reason: Reason, message: str) -> str:
    """Return what to do where the message of a condition tells more than its reason; empty where it does not."""
    if reason is Reason.RECEIVER_FAILING:
        return next((remedy for part, remedy in _ADDRESS_REMEDIES if part in message), "")
    return _UNAUTHORIZED if reason is Reason.PODS_UNREACHABLE and UNAUTHORIZED_EVERYWHERE in message else ""


@dataclass(frozen=True, kw_only=True)
class Names:
    """What commands are filled with: an object, its fleet, and the pod that is worth a look.

    ``gateway`` follows a command that asks the gateway: the option that names one, or nothing. ``selector`` is the word
    by which a shell selects the pods if they are of no fleet, else empty.
    """

    namespace: str
    kind: str
    name: str
    fleet: str
    pod: str
    gateway: str = ""
    selector: str = ""


def command(reason: Reason, names: Names) -> str | None:
    """Return the command to run next; None if the reason asks nothing of the user."""
    template = (COMMANDS_OF_SELECTORS.get(reason) if names.selector else None) or COMMANDS.get(reason)
    if template is None:
        return None
    return template.format(**vars(names))


def results_command(names: Names) -> str:
    """Return the command that shows what the gateway has of a round."""
    return _RESULTS.format(**vars(names))


def check_command(namespace: str) -> str:
    """Return the command that checks what objects of a namespace need."""
    return _CHECK.format(namespace=namespace)
