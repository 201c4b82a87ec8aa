# SPDX-License-Identifier: Apache-2.0
"""``check``: whether the cluster has what rounds need."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import typer

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import COMPONENT, GROUP, Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.cli import VERSION, gateway_proxy, output, preflight
from poc_operator.cli.cluster import FAILED, Cluster, Forbidden, NotFound, Object, UserError, connect, core
from poc_operator.cli.explanation import Evidence
from poc_operator.cli.looking import GATEWAY_SECONDS, SELECTING, KindT, deployments, known, now, worker_pods
from poc_operator.cli.options import Context, GatewayPlace, Kubeconfig, Namespace, Output
from poc_operator.cli.output import Column, Format
from poc_operator.cli.preflight import Check, Level
from poc_operator.observed import PodView

#: So many rounds that are over are asked for results that no receiver has taken, and as many that were deleted: the
#: newest ones. The gateway names so many with such results, deleted or not.
_MOST_OVER, _MOST_UNDELIVERED = 20, 100
KINDS: tuple[type[Resource], ...] = (PoCRound, PoCValidation, PoCCalibration, PoCFleet)
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
#: Without the contents of Secrets.
_METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
_COLUMNS = (Column("RESULT"), Column("FINDING"))


def check(
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    gateway: GatewayPlace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Check CRDs, operator, gateway, GPUs, fleets, Secrets, PVCs and rounds; exit code 1 if something is wrong."""
    cluster = connect(context, namespace, kubeconfig)
    if namespace:
        cluster.expect_namespace()
    found = list(checks(cluster, gateway))
    if format_ is Format.TABLE:
        output.console().print(table(found))
    else:
        output.show([one.model_dump(mode="json", by_alias=True) for one in found], format_)
    if preflight.worst(found) is Level.ERROR:
        raise typer.Exit(FAILED)


def table(found: Iterable[Check]) -> output.Fitted:
    """Return the table. A remedy stands on lines of its own, where commands have the width that they need."""
    return output.table("", _COLUMNS, [_row(one) for one in found])


def _row(one: Check) -> tuple[str, str]:
    remedy = f"\nWhat to do: {one.remedy}" if one.remedy else ""
    return one.level.upper(), f"{one.about}: {one.finding}{remedy}"


def checks(cluster: Cluster, gateway: str | None) -> Iterator[Check]:
    """Look at everything, one after the other. What may not be read is a warning."""
    yield from _guarded("API server", lambda: [_api_server(cluster)])
    remedy = _crd_remedy(cluster)
    for kind in KINDS:
        yield from _guarded(f"CRD {kind.KIND.plural}", partial(_crd, cluster, kind, remedy))
    yield from _guarded("operator", lambda: _operator(cluster))
    yield from _guarded("gateway", lambda: _gateway(cluster, gateway))
    yield from _guarded("GPUs", lambda: [preflight.gpus(cluster.items(core("nodes")))])
    yield from _guarded("fleets", lambda: _fleets(cluster))
    yield from _guarded("rounds", lambda: _rounds(cluster, gateway))


def _guarded(about: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    try:
        return list(look())
    except Forbidden as error:
        return [preflight.warning(about, f"it could not be looked at: {error}", "ask for the right, see the docs")]
    except NotFound as error:
        return [preflight.error(about, str(error), "install the chart vllm-poc-operator")]


def _api_server(cluster: Cluster) -> Check:
    begin = time.monotonic()
    cluster.get("/version")
    return preflight.api_server(time.monotonic() - begin)


def _crd_remedy(cluster: Cluster) -> str:
    """Return what brings the CRDs, also for a user who may not look whether there is an operator."""
    try:
        return preflight.crd_remedy(installed=bool(deployments(cluster)))
    except Forbidden:
        return preflight.crd_remedy(installed=False)


def _crd(cluster: Cluster, kind: type[Resource], remedy: str) -> list[Check]:
    return [preflight.crd(kind, _get(cluster, f"{_CRDS}/{kind.KIND.plural}.{GROUP}"), remedy)]


def _get(cluster: Cluster, path: str) -> Object | None:
    try:
        body: Object = cluster.get(path)
    except NotFound:
        return None
    return body


def _operator(cluster: Cluster) -> Iterator[Check]:
    found = deployments(cluster)
    yield from preflight.operator(found, VERSION)
    for place, body in sorted({preflight.lease_place(body): body for body in reversed(found)}.items()):
        path = f"/apis/coordination.k8s.io/v1/namespaces/{place}/leases/{COMPONENT}"
        yield from _guarded("Lease", partial(_lease, cluster, path, body))


def _lease(cluster: Cluster, path: str, operator: Object) -> list[Check]:
    return [preflight.lease(_get(cluster, path), now(), preflight.operator_log([operator]))]


def _operator_remedy(cluster: Cluster) -> str:
    """Return what to do about an operator that does not act, also for a user who may not look where it is."""
    try:
        return preflight.operator_log(deployments(cluster))
    except Forbidden:
        return preflight.operator_log([])


def _gateway(cluster: Cluster, option: str | None) -> Iterator[Check]:
    found = _places(cluster, option)
    if not found:
        remedy = "install the chart with gateway.enabled, if results are to be kept or the network served"
        yield preflight.warning("gateway", "there is none: pods deliver straight to the receivers", remedy)
    for place in found:
        yield from _answers(cluster, place)
        yield from _guarded(f"gateway {place}", partial(_gateway_objects, cluster, place))


def _places(cluster: Cluster, option: str | None) -> list[gateway_proxy.Place]:
    return [gateway_proxy.parse_place(option)] if option else gateway_proxy.places(cluster)


def _answers(cluster: Cluster, place: gateway_proxy.Place) -> list[Check]:
    about = f"gateway {place}"
    try:
        gateway = gateway_proxy.find(cluster, str(place))
        rounds = gateway.get("/rounds", {"limit": "1"})
        health = gateway.health()
    except UserError as error:
        if isinstance(error, Forbidden):
            return [preflight.warning(about, f"it could not be asked: {error}", "ask for the right services/proxy")]
        why = error.why if isinstance(error, gateway_proxy.Unavailable) else error
        return [preflight.error(about, f"it does not answer through the API server: {why}", _look(place))]
    answers = preflight.ok(about, f"it answers, and has {'rounds' if rounds['rounds'] else 'no round yet'}")
    disk = preflight.gateway_disk(about, full=health.storage_full)
    if health.certificate_expires is None:
        return [answers, disk]
    return [answers, disk, preflight.gateway_certificate(about, health.certificate_expires, now())]


def _look(place: gateway_proxy.Place) -> str:
    log = preflight.log(place.namespace, place.name)
    wait = "wait a minute if the gateway has just started, then look at its log"
    return f"{wait}: {log}; if the gateway is well, let API servers in: gateway.networkPolicy.insideFrom"


def _gateway_objects(cluster: Cluster, place: gateway_proxy.Place) -> Iterator[Check]:
    body = cluster.get(f"/apis/apps/v1/namespaces/{place.namespace}/deployments/{place.name}")
    spec = body["spec"]["template"]["spec"]
    of = f"the gateway {place}"
    yield from _objects(cluster, place.namespace, preflight.pod_secrets(spec), preflight.pod_claims(spec), of)


def _fleets(cluster: Cluster) -> Iterator[Check]:
    found, _ = _everywhere(cluster, PoCFleet)
    if not found:
        yield preflight.own_pods(_own_pods(cluster))
    yield from preflight.fleets(found, _operator_remedy(cluster) if found else "")
    for fleet in found:
        secrets, claims = preflight.fleet_secrets(fleet), preflight.fleet_claims(fleet)
        of = f"the fleet {fleet.metadata.name}"
        yield from _objects(cluster, fleet.metadata.namespace, secrets, claims, of)


def _own_pods(cluster: Cluster) -> list[PodView]:
    """Return the pods that may compute, of all namespaces, or of the user's where more may not be read."""
    work = list[PoCRound | PoCValidation | PoCCalibration]()
    for kind in SELECTING:
        with suppress(Forbidden):  # it is told of where it is looked at by itself
            work += _everywhere(cluster, kind)[0]
    try:
        bodies = worker_pods(cluster.items, None, work)
    except Forbidden:
        bodies = worker_pods(cluster.items, cluster.namespace, work)
    return [pod for pod in map(PodView.parse, bodies) if pod.stays]


def _everywhere(cluster: Cluster, kind: type[KindT]) -> tuple[list[KindT], str | None]:
    """Return the objects of all namespaces, or of the user's where more may not be read, and which one that is."""
    try:
        return known(cluster, kind, None), None
    except Forbidden:
        return known(cluster, kind, cluster.namespace), cluster.namespace


def _rounds(cluster: Cluster, option: str | None) -> Iterator[Check]:
    found, within = _everywhere(cluster, PoCRound)
    under_way = [one for one in found if not one.status.state.finished]
    if not under_way:
        yield preflight.ok("rounds", "none is under way")
    over = [one for one in found if one.status.state.finished]
    over.sort(key=lambda one: one.metadata.creation_timestamp, reverse=True)
    gateways = _asked(cluster, option)
    remedy = _operator_remedy(cluster) if under_way else ""
    for one in under_way:
        told = _forwarding(gateways, one)
        seen = Evidence(subject=one, now=now(), forwarding=told, gateway=option)
        yield from preflight.unfinished_round(seen, remedy)
    for one in over[:_MOST_OVER]:
        told = _forwarding(gateways, one)
        yield from preflight.finished_round(Evidence(subject=one, now=now(), forwarding=told, gateway=option))
    yield from _deleted_rounds(gateways, found, within, option)


def _deleted_rounds(
    gateways: list[gateway_proxy.Gateway], found: Iterable[PoCRound], within: str | None, option: str | None
) -> Iterator[Check]:
    """Look at rounds that the gateways alone still know. ``within`` is the only namespace that may be read."""
    there = {one.metadata.uid for one in found}
    for gateway in list(gateways):
        try:
            listed = gateway.undelivered(within, _MOST_UNDELIVERED)
        except UserError:  # an older one, or one of which it is told already
            continue
        for namespace, name, uid in [one for one in listed if one[2] not in there][:_MOST_OVER]:
            try:
                told = gateway.forwarding(namespace, name, uid)
            except UserError as error:
                yield preflight.warning(f"round {namespace}/{name}", str(error), "ask again")
            else:
                yield from preflight.deleted_round(told, namespace, name, option)


def _asked(cluster: Cluster, option: str | None) -> list[gateway_proxy.Gateway]:
    """Return the gateways that may be asked: of the others it is told already."""
    try:
        return [gateway_proxy.find(cluster, str(place), GATEWAY_SECONDS) for place in _places(cluster, option)]
    except UserError:
        return []


def _forwarding(gateways: list[gateway_proxy.Gateway], found: PoCRound) -> gateway_proxy.Forwarding | None:
    """Return what the gateway that has a round tells of it. One that gives no answer is asked no more."""
    for gateway in list(gateways):
        try:
            told = gateway.forwarding(found.metadata.namespace, found.metadata.name, found.metadata.uid)
        except UserError:
            gateways.remove(gateway)
            continue
        if told.knows_round:
            return replace(told, storage_full=False)  # of its disk it is told once, not with each round
    return None


def _objects(cluster: Cluster, namespace: str, secrets: list[str], claims: list[str], of: str) -> Iterator[Check]:
    for name in secrets:
        about = f"Secret {namespace}/{name}"
        yield from _guarded(about, partial(_secret, cluster, namespace, name, of))
    for name in claims:
        yield from _guarded(f"PVC {namespace}/{name}", partial(_claim, cluster, namespace, name, of))


def _claim(cluster: Cluster, namespace: str, name: str, of: str) -> list[Check]:
    body = _get(cluster, f"{core('persistentvolumeclaims', namespace)}/{name}")
    return [preflight.claim(namespace, name, body, of=of)]


def _secret(cluster: Cluster, namespace: str, name: str, of: str) -> list[Check]:
    try:
        cluster.get(f"{core('secrets', namespace)}/{name}", headers=_METADATA_ONLY)
    except NotFound:
        return [preflight.secret(namespace, name, of=of, exists=False)]
    return [preflight.secret(namespace, name, of=of, exists=True)]
