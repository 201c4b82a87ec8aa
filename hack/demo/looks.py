# SPDX-License-Identifier: Apache-2.0
"""What the demo shows while it waits: deployments, the fleet and the round."""

from typing import Any

from hack.deploy.kube import Kube
from hack.deploy.releases import FLEET_LABEL
from hack.toolchain.common import UserError

Look = tuple[bool, str]


def deployment(kube: Kube, namespace: str, name: str) -> Look:
    """Whether all pods of a deployment's newest version are ready, and what the others wait for."""
    found = kube.get("--namespace", namespace, "deployment", name)
    status, wanted = found.get("status", {}), found["spec"]["replicas"]
    ready = min(status.get("updatedReplicas", 0), status.get("readyReplicas", 0))
    current = status.get("observedGeneration") == found["metadata"]["generation"]
    if current and ready == wanted == status.get("replicas"):
        return True, f"{ready} of {wanted} pods ready"
    selector = ",".join(f"{key}={value}" for key, value in found["spec"]["selector"]["matchLabels"].items())
    pods = kube.get("--namespace", namespace, "pods", "--selector", selector)["items"]
    return False, f"{ready} of {wanted} pods ready; " + ("; ".join(map(_pod, pods)) or "no pod yet")


def fleet(kube: Kube, namespace: str, name: str) -> Look:
    """Whether all pods of a fleet are ready, and what the others wait for. UserError if it waits for a person."""
    found = kube.get("--namespace", namespace, "pocfleet", name)
    status, wanted = found.get("status", {}), found["spec"]["replicas"]
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return False, "waiting for the operator"
    if any(one["type"] == "Stalled" and one["status"] == "True" for one in status.get("conditions", [])):
        raise UserError(f"the fleet {name} cannot go on: {status.get('message')}")
    # The pods themselves: the status may be a moment old.
    pods = kube.get("--namespace", namespace, "pods", "--selector", f"{FLEET_LABEL}={name}")["items"]
    ready = sum(map(_is_ready, pods))
    text = f"{ready} of {wanted} pods ready"
    if ready == wanted == len(pods):
        return True, text
    return False, f"{text}; " + ("; ".join(map(_pod, pods)) or "no pod yet")


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _pod(pod: dict[str, Any]) -> str:
    """Say in a few words what a pod waits for."""
    name = pod["metadata"]["name"].rsplit("-", 1)[-1]
    statuses = pod.get("status", {}).get("containerStatuses", [])
    reasons = [s["state"]["waiting"].get("reason", "") for s in statuses if "waiting" in s.get("state", {})]
    if any(reason in _HOPELESS for reason in reasons):
        raise UserError(f"pod {pod['metadata']['name']} cannot start ({reasons[0]}): see kubectl describe pod.")
    if reasons:
        return f"{name}: {reasons[0]}"
    if statuses and not statuses[0].get("ready"):
        return f"{name}: loading"
    return f"{name}: {pod.get('status', {}).get('phase', 'Pending')}"


_HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")


def round_progress(kube: Kube, namespace: str, name: str) -> Look:
    """Whether the round is over, and how far it is or what it waits for."""
    found = kube.get("--namespace", namespace, "pocround", name)
    status = found.get("status", {})
    state, totals = status.get("state", "Pending"), status.get("totals", {})
    line = f"{state}  {status.get('message', 'waiting for the operator')}"
    if totals.get("checked"):
        line = (
            f"{state}  {totals['checked']} nonces, {totals['valid']} valid, {totals['rate']}/s, "
            f"{status.get('running', 0)} of {status.get('desired', 0)} slots running; {status.get('message', '')}"
        )
    if state == "Failed":
        raise UserError(f"the round failed: {status.get('message')}")
    return state == "Complete", line
