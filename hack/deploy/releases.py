# SPDX-License-Identifier: Apache-2.0
"""The operator and two vLLM pods on the local cluster, as the demo and the tests use them."""

from hack.cluster.up import up
from hack.deploy.kube import Kube, local_kube
from hack.deploy.local import OPERATOR_CHART, WORKER_CHART, gateway_volume, operator_values, worker_values
from hack.models.store import models
from hack.toolchain.__main__ import install
from hack.toolchain.common import exclusive, step
from hack.vllm.environment import environment

SYSTEM_NAMESPACE = "poc-system"
NAMESPACE = "poc-demo"
OPERATOR = "vllm-poc-operator"
GATEWAY = f"{OPERATOR}-gateway"
WORKER = "vllm-poc-worker"
PODS = 2

OPERATOR_SECONDS = 120.0
WORKER_SECONDS = 900.0

# Nothing outside the machine reaches this cluster, and the tests deliver to receivers of their own.
OPEN = {"auth": {"open": True}, "poc": {"callbackAllow": ["*"]}}

# The API server then refuses an operator that asks for more than the strictest level grants.
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def deploy_locally() -> Kube:
    """Bring the cluster and both releases up to date; what has not changed stays as it is."""
    install()
    environment()
    models()
    with exclusive("cluster"), step("cluster up"):
        up()
    kube = local_kube()
    with step("images and charts"):
        kube.ensure_namespace(SYSTEM_NAMESPACE, RESTRICTED)
        # Before the operator's chart, which gives the gateway a Role there.
        kube.ensure_namespace(NAMESPACE, {})
        kube.apply(gateway_volume())
        kube.helm_install(OPERATOR, OPERATOR_CHART, SYSTEM_NAMESPACE, operator_values(NAMESPACE))
        kube.helm_install(WORKER, WORKER_CHART, NAMESPACE, {**worker_values(replicas=PODS), **OPEN})
    return kube
