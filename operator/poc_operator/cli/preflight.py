# SPDX-License-Identifier: Apache-2.0
"""What ``check`` finds out about a cluster: pure functions of what was read, each with a remedy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_pod import GPU_RESOURCE, PRODUCT_LABEL
from poc_operator.apis.v1alpha1.meta import COMPONENT, VERSION, Resource
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.schema import ApiModel, aliases
from poc_operator.cli.cluster import Object
from poc_operator.cli.explanation import NO_RESULTS, Evidence, Finding, account, lost, undelivered, waiting_results
from poc_operator.cli.gateway_proxy import Forwarding
from poc_operator.cli.next_steps import Names, check_command
from poc_operator.observed import PodView

#: Label with the version of what a chart has installed.
VERSION_LABEL = "app.kubernetes.io/version"
#: A lease that was not renewed for so many times its duration is nobody's.
_LATE = 2
#: Seconds of one small request from which on the API server counts as slow.
SLOW_SECONDS = 2.0
#: A certificate that is valid for less time counts as forgotten; the alert PoCGatewayCertificateExpires has the same.
CERTIFICATE_LEFT = timedelta(days=7)
#: An operator that is well acts on a new object within seconds.
SEEN_WITHIN = timedelta(seconds=60)
#: Reasons of rounds that often pass by themselves. Those of slots are those of the alert PoCWorkImpaired.
PASSING = frozenset(
    {
        Reason.NO_MATCHING_PODS,  # as while the fleet downloads its model
        Reason.NO_POD_READY,
        Reason.PENDING,
        Reason.PODS_BUSY,
        Reason.PODS_LEFT,
        Reason.RESULTS_REJECTED,
        Reason.SLOTS_LEAVING,
        Reason.SLOTS_PAUSED,
        Reason.SLOTS_WAITING,
    }
)


class Level(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Check(ApiModel):
    """One thing that was looked at, what was found, and what to do about it."""

    about: str
    level: Level
    finding: str
    remedy: str = ""


def ok(about: str, finding: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(about=about, level=Level.OK, finding=finding)


def warning(about: str, finding: str, remedy: str) -> Check:
    """Return a check that found what may be wrong, or could not look."""
    return Check(about=about, level=Level.WARNING, finding=finding, remedy=remedy)


def error(about: str, finding: str, remedy: str) -> Check:
    """Return a check that found what keeps rounds from running."""
    return Check(about=about, level=Level.ERROR, finding=finding, remedy=remedy)


def api_server(seconds: float) -> Check:
    """Check how long the API server took for a small request."""
    about = "API server"
    if seconds < SLOW_SECONDS:
        return ok(about, f"it answers within {seconds:.1f} s")
    finding = f"it took {seconds:.1f} s for a small request: status comes late, and the operator may lose its Lease"
    return warning(
        about, finding, "look at the load of the API server and of etcd: kubectl get --raw '/readyz?verbose'"
    )


def gateway_disk(about: str, *, full: bool) -> Check:
    """Check that a gateway has room for results."""
    if not full:
        return ok(f"{about} disk", "it has room")
    remedy = "enlarge its volume, or keep rounds for a shorter time (gateway.retention)"
    return error(f"{about} disk", "it is full: nothing new is stored, and pods keep their results", remedy)


def gateway_certificate(about: str, expires: datetime, now: datetime) -> Check:
    """Check that the network node may trust a gateway's certificate, and for how long."""
    what, left = f"{about} certificate", expires - now
    if left > CERTIFICATE_LEFT:
        return ok(what, f"it is valid until {expires:%Y-%m-%d %H:%M} UTC")
    remedy = "renew the Secret of gateway.tls.existingSecret: the gateway takes it over without a restart"
    if left > timedelta():
        return warning(what, f"it expires at {expires:%Y-%m-%d %H:%M} UTC", remedy)
    return error(what, f"it has expired at {expires:%Y-%m-%d %H:%M} UTC: the network node cannot connect", remedy)


def crd_remedy(*, installed: bool) -> str:
    """Return what brings the CRDs. Helm takes over none that it has not made, so that the chart has to come first."""
    if installed:
        return "apply the CRDs of this version: kubectl apply --server-side -f crds/"
    return "install the chart vllm-poc-operator, which brings them; only with crds.enabled=false apply crds/ yourself"


def crd(kind: type[Resource], body: Object | None, remedy: str) -> Check:
    """Check that a CRD is installed, and has all fields that this version knows; ``remedy`` is `crd_remedy`."""
    about = f"CRD {kind.KIND.plural}"
    if body is None:
        return error(about, "it is not installed", remedy)
    served = [one for one in body["spec"]["versions"] if one["name"] == VERSION and one.get("served")]
    if not served:
        return error(about, f"it does not serve {VERSION}", remedy)
    schema = served[0].get("schema", {}).get("openAPIV3Schema", {})
    missing = list(_missing(kind, schema))
    if missing:
        return error(about, f"it is of another version: it has no field {', '.join(missing[:3])}", remedy)
    return ok(about, f"it is installed, with all fields of {VERSION}")


def _missing(kind: type[Resource], schema: Mapping[str, Any]) -> Iterator[str]:
    for part in ("spec", "status"):
        model = kind.model_fields[part].annotation
        known = schema.get("properties", {}).get(part, {}).get("properties", {})
        if isinstance(model, type) and issubclass(model, ApiModel):
            yield from (f"{part}.{name}" for name in aliases(model).values() if name not in known)


def operator_trouble(deployments: Sequence[Object]) -> str:
    """Return what is wrong with the operator's Deployments; empty if one of them is available."""
    if not deployments:
        return (
            "no operator is installed: there is no Deployment with the label app.kubernetes.io/name=vllm-poc-operator"
        )
    if any((body.get("status") or {}).get("availableReplicas") for body in deployments):
        return ""
    body = _expected(deployments)
    meta, why = body["metadata"], "is scaled to 0 replicas" if _is_scaled_away(body) else "has no available pod"
    return f"the operator does not run: the Deployment {meta['namespace']}/{meta['name']} {why}"


def _expected(deployments: Sequence[Object]) -> Object:
    """Return the Deployment that should run: one that nobody has scaled to 0 before all others."""
    return min(deployments, key=_is_scaled_away)


def _is_scaled_away(deployment: Object) -> bool:
    return (deployment.get("spec") or {}).get("replicas") == 0


def _operator_back(deployments: Sequence[Object]) -> str:
    """Return what brings the operator back, or says why it is away."""
    if not deployments:
        return "install the chart vllm-poc-operator"
    body = _expected(deployments)
    meta = body["metadata"]
    if _is_scaled_away(body):
        return f"kubectl -n {meta['namespace']} scale deployment {meta['name']} --replicas=1"
    return f"kubectl -n {meta['namespace']} describe pods -l app.kubernetes.io/name=vllm-poc-operator"


def operator(deployments: Sequence[Object], version: str) -> Iterator[Check]:
    """Check that an operator runs, and is of the plugin's version."""
    trouble = operator_trouble(deployments)
    if trouble:
        yield error("operator", trouble, _operator_back(deployments))
        return
    for body in deployments:
        meta = body["metadata"]
        found = (meta.get("labels") or {}).get(VERSION_LABEL, "")
        about = f"operator {meta['namespace']}/{meta['name']}"
        if found and found != version:
            yield warning(
                about, f"it is of version {found}, the plugin of {version}", "install the plugin of that version"
            )
        else:
            yield ok(about, f"it runs, version {found or version}")


def lease_place(deployment: Object) -> str:
    """Return the namespace of an operator's Lease."""
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        for argument in container.get("args") or []:
            option, _, value = argument.partition("=")
            if option == "--lease-namespace":
                return str(value)
    return str(deployment["metadata"]["namespace"])


def log(namespace: str, deployment: str) -> str:
    """Return the command that shows the last lines of a Deployment's log."""
    return f"kubectl -n {namespace} logs deployment/{deployment} --tail=50"


def operator_log(deployments: Sequence[Object]) -> str:
    """Return what to do about an operator that does not act, with the command that shows its log."""
    metas = [body["metadata"] for body in deployments[:1]]
    shown = [log(meta["namespace"], meta["name"]) for meta in metas] or [log("NAMESPACE", COMPONENT)]
    return f"wait a minute if the operator has just started, then look at its log: {shown[0]}"


def lease(body: Object | None, now: datetime, remedy: str) -> Check:
    """Check that an operator holds the Lease and renews it; ``remedy`` is `operator_log`."""
    if body is None:
        return error("Lease", "no operator has ever held it", remedy)
    spec = body["spec"]
    told = spec.get("renewTime")
    if not told or not spec.get("holderIdentity"):
        return error("Lease", "nobody holds it", remedy)
    silent = now - datetime.fromisoformat(told)
    if silent > timedelta(seconds=_LATE * int(spec.get("leaseDurationSeconds") or 15)):
        return error(
            "Lease", f"{spec['holderIdentity']} has not renewed it for {int(silent.total_seconds())} s", remedy
        )
    return ok("Lease", f"{spec['holderIdentity']} holds it")


def gpus(nodes: Sequence[Object]) -> Check:
    """Check that Kubernetes nodes offer GPUs, and say which."""
    about = "GPUs"
    offering = [node for node in nodes if _count(node)]
    if not offering:
        remedy = "install NVIDIA's device plugin or GPU operator; without GPUs only the smallest models run"
        return warning(about, f"none of {len(nodes)} Kubernetes nodes offers {GPU_RESOURCE}", remedy)
    unlabelled = [
        node["metadata"]["name"] for node in offering if PRODUCT_LABEL not in (node["metadata"].get("labels") or {})
    ]
    total = sum(map(_count, offering))
    found = f"{total} GPUs on {len(offering)} Kubernetes nodes"
    if unlabelled:
        remedy = "install GPU feature discovery, or set spec.gpu.product of each fleet with a preset"
        return warning(about, f"{found}; {unlabelled[0]} has no label {PRODUCT_LABEL}", remedy)
    products = sorted({node["metadata"]["labels"][PRODUCT_LABEL] for node in offering})
    return ok(about, f"{found}: {', '.join(products)}")


def _count(node: Object) -> int:
    told = ((node.get("status") or {}).get("allocatable") or {}).get(GPU_RESOURCE, "0")
    return int(told) if str(told).isdecimal() else 0


def fleets(found: Sequence[PoCFleet], operator_remedy: str) -> Iterator[Check]:
    """Check that each fleet has its model and its pods; ``operator_remedy`` is `operator_log`."""
    for fleet in found:
        yield _fleet(fleet, operator_remedy)


def own_pods(found: Sequence[PodView]) -> Check:
    """Check that there are pods that may compute, where there is no fleet."""
    if not found:
        return warning("fleets", "there is none", "create a PoCFleet, or label pods of your own")
    ready = sum(pod.ready for pod in found)
    told = f"there is none; pods of your own that are labelled or selected: {len(found)}, of which {ready} are ready"
    if ready:
        return ok("fleets", told)
    return warning("fleets", told, f"kubectl -n {found[0].namespace} describe pod {found[0].name}")


def _fleet(fleet: PoCFleet, operator_remedy: str) -> Check:
    about = f"fleet {fleet.metadata.namespace}/{fleet.metadata.name}"
    conditions = fleet.status.own_conditions
    look = f"kubectl poc -n {fleet.metadata.namespace} explain fleet/{fleet.metadata.name}"
    for type_ in ("Stalled", "Degraded"):
        condition = conditions.get(type_)
        if condition is not None and condition.status == "True":
            return error(
                about, f"{condition.reason}: {condition.message}", f"{_remedy(condition.reason)} {look}".strip()
            )
    model = fleet.status.model or "its model"
    ready = conditions.get("Ready")
    if not fleet.status.observed_generation:
        return warning(about, "no operator has seen it yet", operator_remedy)
    if ready is None or ready.status != "True":
        return warning(about, f"it is not ready: {fleet.status.message or 'it has not told why'}", look)
    return ok(about, f"{model}, {fleet.status.ready} pods are ready")


def _remedy(reason: str) -> str:
    try:
        return EXPLANATIONS[Reason(reason)].remedy or ""
    except ValueError:
        return ""


def unfinished_round(found: Evidence, operator_remedy: str) -> list[Check]:
    """Check that nothing keeps a round back: what ``explain`` would name, as far as it asks something of the user.

    ``operator_remedy`` is `operator_log`.
    """
    meta, status = found.subject.metadata, found.subject.status
    about = f"round {meta.namespace}/{meta.name}"
    if status.observed_generation < meta.generation and found.now - meta.creation_timestamp > SEEN_WITHIN:
        finding = (
            f"no operator has acted on its spec: generation {meta.generation}, seen is {status.observed_generation}"
        )
        remedy = f"look whether the operator runs, and whether watchNamespaces of its chart has {meta.namespace}"
        return [error(about, finding, remedy)]
    if not status.observed_generation:
        return [warning(about, "no operator has seen it yet", operator_remedy)]
    wrong = [finding for finding in account(found).findings if finding.remedy]
    if not wrong:
        return [ok(about, f"nothing keeps it back: {status.message}")]
    return _told_of(found, wrong)


def finished_round(found: Evidence) -> list[Check]:
    """Check that a round that is over has results, and that none of them still waits for its receiver."""
    without = [finding for finding in lost(found) if finding.reason != Reason.SLOTS_WAITING]
    return _told_of(found, [*without, *undelivered(found)])


def deleted_round(told: Forwarding, namespace: str, name: str, gateway: str | None) -> list[Check]:
    """Check that no result of a round that was deleted still waits for its receiver.

    ``gateway`` is what the option of that name says.
    """
    option = f" --gateway {gateway}" if gateway else ""
    names = Names(namespace=namespace, kind=PoCRound.KIND.singular, name=name, fleet="", pod="", gateway=option)
    return [
        error(
            f"round {namespace}/{name}",
            f"{one.reason}: {one.seen} The round was deleted, and {one.meaning}",
            f"{one.remedy} {one.command}",
        )
        for one in waiting_results(told, names)
    ]


def _told_of(found: Evidence, wrong: Iterable[Finding]) -> list[Check]:
    meta = found.subject.metadata
    option = f" --gateway {found.gateway}" if found.gateway else ""
    look = f" kubectl poc -n {meta.namespace} explain {meta.name}{option}"
    here = check_command(meta.namespace)  # what explains it would lead back to where it is told
    return [
        Check(
            about=f"round {meta.namespace}/{meta.name}",
            level=_level(found, finding),
            finding=f"{finding.reason}: {finding.seen}",
            remedy=f"{finding.remedy}{look if finding.command != here else ''}",
        )
        for finding in wrong
    ]


def _level(found: Evidence, finding: Finding) -> Level:
    if finding.reason == NO_RESULTS:  # it is over, and may be the round of a user who has another one by now
        return Level.WARNING
    # A fleet has no pods while it downloads its model. Labels of one's own do not come by themselves.
    subject = found.subject
    stays = finding.reason == Reason.NO_MATCHING_PODS and isinstance(subject, PoCRound) and subject.spec.selector
    return Level.WARNING if finding.reason in PASSING and not stays else Level.ERROR


def fleet_claims(fleet: PoCFleet) -> list[str]:
    """Return the PVCs of the user that a fleet names."""
    return [fleet.spec.cache.existing_claim] if fleet.spec.cache.existing_claim else []


def fleet_secrets(fleet: PoCFleet) -> list[str]:
    """Return the Secrets that a fleet names."""
    token = fleet.spec.hugging_face.token_secret
    pull = [secret.name for secret in fleet.spec.image_pull_secrets or []]
    return [*([token] if token else []), *pull]


def pod_secrets(pod_spec: Object) -> list[str]:
    """Return the Secrets that the containers and volumes of a pod name, each once."""
    variables = [one for box in pod_spec.get("containers") or [] for one in box.get("env") or []]
    from_variables = [((one.get("valueFrom") or {}).get("secretKeyRef") or {}).get("name") for one in variables]
    from_volumes = [(volume.get("secret") or {}).get("secretName") for volume in pod_spec.get("volumes") or []]
    return list(dict.fromkeys(name for name in [*from_variables, *from_volumes] if name))


def pod_claims(pod_spec: Object) -> list[str]:
    """Return the PVCs that the volumes of a pod name."""
    named = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in pod_spec.get("volumes") or []]
    return [name for name in named if name]


def secret(namespace: str, name: str, *, of: str, exists: bool) -> Check:
    """Check that a Secret exists."""
    about = f"Secret {namespace}/{name}"
    if exists:
        return ok(about, f"it exists, for {of}")
    return error(about, f"{of} names it, and it does not exist", f"create it, or correct the name in {of}")


def claim(namespace: str, name: str, body: Object | None, *, of: str) -> Check:
    """Check that a PVC exists and has its volume."""
    about = f"PVC {namespace}/{name}"
    if body is None:
        return error(about, f"{of} names it, and it does not exist", f"create it, or correct the name in {of}")
    phase = (body.get("status") or {}).get("phase")
    if phase != "Bound":
        return warning(about, f"it is {phase}, for {of}", f"kubectl -n {namespace} describe pvc {name}")
    return ok(about, f"it is bound, for {of}")


def worst(checks: Iterable[Check]) -> Level:
    """Return the worst level of some checks."""
    levels = {check.level for check in checks}
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)
