# SPDX-License-Identifier: Apache-2.0
"""The local cluster with the operator and a fleet: brought up once per test run, and left up."""

from collections.abc import Callable
from functools import cache

import pytest

from hack.demo.looks import deployment, fleet
from hack.deploy.kube import Kube
from hack.deploy.local import FLEET
from hack.deploy.releases import (
    FLEET_LABEL,
    FLEET_SECONDS,
    GATEWAY,
    NAMESPACE,
    OPERATOR,
    OPERATOR_SECONDS,
    SYSTEM_NAMESPACE,
    deploy_locally,
    replace_outdated,
)
from hack.toolchain.common import UserError
from hack.toolchain.steps import follow

LOG_LINES = 30
#: (kubectl arguments) that tell what became of the pods and what the operator says.
_DIAGNOSES = (
    ("get", "pods,pocrounds,pocfleets", "--all-namespaces", "-o", "wide"),
    ("--namespace", NAMESPACE, "get", "events", "--sort-by=.lastTimestamp"),
    ("--namespace", SYSTEM_NAMESPACE, "describe", "pods"),
    ("--namespace", SYSTEM_NAMESPACE, "logs", f"deployment/{OPERATOR}", f"--tail={LOG_LINES}"),
    ("--namespace", SYSTEM_NAMESPACE, "logs", f"deployment/{GATEWAY}", f"--tail={LOG_LINES}"),
    ("--namespace", NAMESPACE, "logs", "--selector", f"{FLEET_LABEL}={FLEET}", f"--tail={LOG_LINES}"),
)


@cache
def deployed() -> Kube:
    """Return the tools of a cluster whose operator and vLLM pods are ready."""
    kube = deploy_locally()
    ready(kube, replace_outdated)
    return kube


def ready(kube: Kube, then: Callable[[Kube], None] = lambda _: None) -> None:
    """Wait until the operator and the gateway are ready, do what is to be done ``then``, and wait for the vLLM pods."""
    try:
        follow("operator", lambda: deployment(kube, SYSTEM_NAMESPACE, OPERATOR), OPERATOR_SECONDS)
        follow("gateway", lambda: deployment(kube, SYSTEM_NAMESPACE, GATEWAY), OPERATOR_SECONDS)
        then(kube)
        follow("vLLM pods", lambda: fleet(kube, NAMESPACE, FLEET), FLEET_SECONDS)
    except UserError as error:
        pytest.fail(f"{error}\n{diagnosis(kube)}")


def diagnosis(kube: Kube) -> str:
    """Return what a person would look at first when a wait on the cluster took too long."""
    return "\n\n".join(_tail(kube, arguments) for arguments in _DIAGNOSES)


def _tail(kube: Kube, arguments: tuple[str, ...]) -> str:
    try:
        text = kube.kubectl(*arguments)
    except UserError as error:
        text = str(error)
    return f"$ kubectl {' '.join(arguments)}\n" + "\n".join(text.splitlines()[-LOG_LINES:])
