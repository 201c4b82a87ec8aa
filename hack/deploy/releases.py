# SPDX-License-Identifier: Apache-2.0
"""The operator and a fleet of two vLLM pods on the local cluster, as the demo and the tests use them."""

import hashlib
import json

from hack.cluster.up import up
from hack.deploy.kube import Kube, local_kube
from hack.deploy.local import FLEET, OPERATOR_CHART, Values, fleet_spec, gateway_volume, operator_values
from hack.models.store import models
from hack.toolchain.__main__ import install
from hack.toolchain.common import UserError, exclusive, wait_until
from hack.toolchain.steps import step
from hack.vllm.environment import environment

SYSTEM_NAMESPACE = "poc-system"
NAMESPACE = "poc-demo"
OPERATOR = "vllm-poc-operator"
GATEWAY = f"{OPERATOR}-gateway"
PODS = 2
#: Label of the pods of a fleet.
FLEET_LABEL = "poc.gonka.ai/fleet"
#: Label that tells of which spec a pod is.
SPEC_LABEL = "poc-demo/spec"

OPERATOR_SECONDS = 120.0
FLEET_SECONDS = 900.0

# Nothing outside the machine reaches this cluster, and the tests deliver to receivers of their own.
OPEN = {"auth": {"open": True}, "callbackAllow": ["*"]}
# `replace_outdated` replaces the pods, before anything computes on them.
UNCHANGED = {"update": {"strategy": "Never"}}

# The API server then refuses an operator that asks for more than the strictest level grants.
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def deploy_locally() -> Kube:
    """Bring the cluster, the operator and the fleet up to date; what has not changed stays as it is."""
    install()
    environment()
    models()
    with exclusive("cluster"), step("cluster up"):
        up()
    kube = local_kube()
    with step("images, chart and fleet"):
        kube.ensure_namespace(SYSTEM_NAMESPACE, RESTRICTED)
        # Before the operator's chart, which gives the gateway a Role there.
        kube.ensure_namespace(NAMESPACE, {})
        kube.apply(gateway_volume())
        kube.helm_install(OPERATOR, OPERATOR_CHART, SYSTEM_NAMESPACE, operator_values(NAMESPACE))
        apply_fleet(kube, {**fleet_spec(replicas=PODS), **OPEN, **UNCHANGED})
    return kube


def apply_fleet(kube: Kube, spec: Values) -> None:
    """Create or change the fleet of the demo and the tests."""
    wait_for_kind(kube)
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    template = {**spec["podTemplate"], "metadata": {"labels": {SPEC_LABEL: digest}}}
    kube.apply(
        {
            "apiVersion": "poc.gonka.ai/v1alpha1",
            "kind": "PoCFleet",
            "metadata": {"name": FLEET, "namespace": NAMESPACE},
            "spec": {**spec, "podTemplate": template},
        }
    )


def wait_for_kind(kube: Kube) -> None:
    """Wait until the API server serves fleets: the chart's CRDs may be seconds old."""
    kube.kubectl("wait", "--for=condition=Established", "crd/pocfleets.poc.gonka.ai", "--timeout=30s")


def replace_outdated(kube: Kube) -> None:
    """Delete the fleet's pods whose template has changed, all at once, and wait until they are gone."""
    namespace = ("--namespace", NAMESPACE)
    digest = kube.get(*namespace, "pocfleet", FLEET)["spec"]["podTemplate"]["metadata"]["labels"][SPEC_LABEL]
    revisions: list[str] = []

    def is_known() -> bool:
        found = kube.get(*namespace, "statefulsets", "--selector", f"{FLEET_LABEL}={FLEET}")["items"]
        revisions[:] = [
            one["status"]["updateRevision"]
            for one in found
            if one["spec"]["template"]["metadata"]["labels"].get(SPEC_LABEL) == digest
            and one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"]
        ]
        return bool(revisions)

    if not wait_until(is_known, OPERATOR_SECONDS, pause=0.5):
        message = kube.get(*namespace, "pocfleet", FLEET).get("status", {}).get("message", "no operator has seen it")
        raise UserError(f"the StatefulSet of the fleet {FLEET} is not as its spec says: {message}")
    outdated = f"{FLEET_LABEL}={FLEET},controller-revision-hash!={revisions[0]}"
    kube.kubectl(*namespace, "delete", "pods", "--selector", outdated, limit=150)
