# SPDX-License-Identifier: Apache-2.0
"""The local cluster with both charts installed: brought up once per test run, and left up."""

from functools import cache

import pytest

from hack.demo.looks import deployment
from hack.demo.progress import follow
from hack.deploy.kube import Kube
from hack.deploy.releases import (
    GATEWAY,
    NAMESPACE,
    OPERATOR,
    OPERATOR_SECONDS,
    SYSTEM_NAMESPACE,
    WORKER,
    WORKER_SECONDS,
    deploy_locally,
)
from hack.toolchain.common import UserError

LOG_LINES = 30
#: (kubectl arguments) that tell what became of the pods and what the operator says.
_DIAGNOSES = (
    ("get", "pods,pocrounds", "--all-namespaces", "-o", "wide"),
    ("--namespace", NAMESPACE, "get", "events", "--sort-by=.lastTimestamp"),
    ("--namespace", SYSTEM_NAMESPACE, "describe", "pods"),
    ("--namespace", SYSTEM_NAMESPACE, "logs", f"deployment/{OPERATOR}", f"--tail={LOG_LINES}"),
    ("--namespace", SYSTEM_NAMESPACE, "logs", f"deployment/{GATEWAY}", f"--tail={LOG_LINES}"),
    ("--namespace", NAMESPACE, "logs", f"deployment/{WORKER}", f"--tail={LOG_LINES}"),
)


@cache
def deployed() -> Kube:
    """Return the tools of a cluster whose operator and vLLM pods are ready."""
    kube = deploy_locally()
    ready(kube)
    return kube


def ready(kube: Kube) -> None:
    """Wait until the operator, the gateway and both vLLM pods are ready."""
    try:
        follow("operator", lambda: deployment(kube, SYSTEM_NAMESPACE, OPERATOR), OPERATOR_SECONDS)
        follow("gateway", lambda: deployment(kube, SYSTEM_NAMESPACE, GATEWAY), OPERATOR_SECONDS)
        follow("vLLM pods", lambda: deployment(kube, NAMESPACE, WORKER), WORKER_SECONDS)
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
