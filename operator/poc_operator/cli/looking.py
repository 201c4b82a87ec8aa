# SPDX-License-Identifier: Apache-2.0
"""What is read from the cluster for an overview, and around one object for its explanation."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import Stage
from poc_operator.apis.v1alpha1.meta import WORKER_LABELS, LabelSelector, Resource, fleet_selector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.cli import gateway_proxy, preflight
from poc_operator.cli.cluster import (
    Cluster,
    Forbidden,
    KindMissing,
    NamespaceMissing,
    NotFound,
    Object,
    UserError,
    core,
)
from poc_operator.cli.explanation import Event, Evidence, Subject, Work
from poc_operator.cli.loading import LogEnd, loads, server_name
from poc_operator.cli.overview import Overview, Seen, overview
from poc_operator.cli.pod_metrics import PodKey, active_pods, read_chat
from poc_operator.observed import PodView
from poc_operator.planning.snapshot import in_order

KindT = TypeVar("KindT", bound=Resource)

#: Kinds by the words that people use for them.
KINDS: dict[str, type[PoCRound] | type[PoCFleet] | type[PoCValidation] | type[PoCCalibration]] = {
    word: kind
    for kind, words in (
        (PoCRound, ("round", "rounds")),
        (PoCFleet, ("fleet", "fleets")),
        (PoCValidation, ("validation", "validations")),
        (PoCCalibration, ("calibration", "calibrations")),
    )
    for word in (*words, kind.KIND.singular, kind.KIND.plural, kind.KIND.short)
}
#: Seconds for an answer of the gateway. A NetworkPolicy may drop what is sent to it, and the rest can be told without.
GATEWAY_SECONDS = 3.0
#: Logs of pods that load which are read at most, how many at once, and the seconds for each.
MOST_LOGS, LOGS_AT_ONCE, LOG_SECONDS = 20, 5, 3.0
#: Lines of each, and its bytes at most. The kubelet counts bytes from the first of these lines on.
LOG_LINES, LOG_BYTES = 60, 2**15
#: So many lines always fit in: container runtimes begin a new one every 16 KiB.
_LINES_THAT_FIT = 2
#: Label of the operator's Deployment.
OPERATOR_SELECTOR = "app.kubernetes.io/name=vllm-poc-operator"
#: Kinds whose objects select pods.
SELECTING: tuple[type[Work], ...] = (PoCRound, PoCValidation, PoCCalibration)
#: What returns the objects at a path of the API server that a selector takes.
List = Callable[[str, str], Sequence[Object]]


def now() -> datetime:
    """Return the time, in UTC."""
    return datetime.now(UTC)


def look(cluster: Cluster, *, everywhere: bool, chat: bool) -> Seen:
    """Read fleets, rounds and pods, and the logs of those that load; with ``chat`` also what pods tell of it."""
    namespace = None if everywhere else cluster.namespace
    rounds, fleets = known(cluster, PoCRound, namespace), known(cluster, PoCFleet, namespace)
    more, unread = readable(cluster, namespace, (PoCValidation, PoCCalibration))
    pods = [PodView.parse(body) for body in worker_pods(cluster.items, namespace, [*rounds, *more])]
    if namespace is not None and not (rounds or fleets or pods):
        cluster.expect_namespace()
    return Seen(
        now=now(),
        fleets=fleets,
        rounds=rounds,
        pods=pods,
        chat=read_chat(cluster, active_pods(rounds)) if chat else {},
        logs=read_logs(cluster, loading_pods(fleets, pods, now())),
        operator=operator_trouble(cluster),
        unread=unread,
    )


def readable(cluster: Cluster, namespace: str | None, kinds: Iterable[type[Work]]) -> tuple[list[Work], list[str]]:
    """Return the objects of these kinds, and what is to be told of kinds that could not be read."""
    found, notes = list[Work](), list[str]()
    for kind in kinds:
        try:
            found += cluster.objects(kind, namespace)
        except UserError as error:
            notes.append(f"pods that only {kind.KIND.plural} select are missing: {error}")
    return found, notes


def worker_pods(list_: List, namespace: str | None, work: Iterable[Work]) -> list[Object]:
    """Return the pods of a namespace, or of all, that may compute: one list for each selector that is of its own.

    An object selects pods of its own namespace alone.
    """
    path, worker = core("pods", namespace), str(LabelSelector(match_labels=WORKER_LABELS))
    found = {_key(body): body for body in list_(path, worker)}
    for selector, namespaces in selectors(work).items():
        for body in list_(path, selector):
            if body["metadata"]["namespace"] in namespaces:
                found.setdefault(_key(body), body)
    return list(found.values())


def selectors(work: Iterable[Work]) -> Mapping[str, set[str]]:
    """Return each selector that may take pods without the workers' label, and the namespaces of its objects."""
    found = dict[str, set[str]]()
    for each in work:
        labels = each.spec.pods.match_labels or {}
        if each.spec.fleet_ref is None and not WORKER_LABELS.items() <= labels.items():
            selector = each.spec.pods.model_copy(update={"match_labels": dict(sorted(labels.items()))})
            found.setdefault(str(selector), set()).add(each.metadata.namespace)
    return found


def _key(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def loading_pods(fleets: Iterable[PoCFleet], pods: Iterable[PodView], now: datetime) -> list[PodView]:
    """Return the first pods that load, by what their fleets say of them, or by their containers without a fleet.

    Of a group that is its leader.
    """
    loading = {pod.uid for fleet in fleets for pod in fleet.status.pods if pod.stage == Stage.LOADING}
    found = (pod for pod in pods if (pod.uid in loading or loads(pod, now)) and pod.stays)
    return sorted(found, key=lambda pod: (pod.namespace, in_order(pod)))[:MOST_LOGS]


def read_logs(cluster: Cluster, pods: Iterable[PodView]) -> Mapping[PodKey, LogEnd]:
    """Read the ends of the logs of vLLM in these pods, a few at once."""
    wanted = list(pods)
    keys = [(pod.namespace, pod.name) for pod in wanted]
    with ThreadPoolExecutor(LOGS_AT_ONCE) as pool:
        return dict(zip(keys, pool.map(lambda pod: _log_end(cluster, pod), wanted), strict=True))


def _log_end(cluster: Cluster, pod: PodView) -> LogEnd:
    path = f"{core('pods', pod.namespace)}/{pod.name}/log"
    query = {"container": server_name(pod), "previous": "false", "limitBytes": str(LOG_BYTES)}
    try:
        text = cluster.text(path, {**query, "tailLines": str(LOG_LINES)}, seconds=LOG_SECONDS)
        if len(text) >= LOG_BYTES:  # its end is missing, as behind a bar that has written over itself for minutes
            text += cluster.text(path, {**query, "tailLines": str(_LINES_THAT_FIT)}, seconds=LOG_SECONDS)
    except UserError as error:
        return LogEnd(error=str(error))
    return LogEnd(text=text.decode(errors="replace"))


def overviews(look_once: Callable[[], Seen], seconds: float, over: Callable[[Seen], bool]) -> Iterator[Overview]:
    """Look every so many seconds until it is over, each time with what has changed since the last look."""
    before: Seen | None = None
    while True:
        seen = look_once()
        yield overview(seen, before)
        if over(seen):
            return
        before = seen
        time.sleep(seconds)


def known(cluster: Cluster, kind: type[KindT], namespace: str | None) -> list[KindT]:
    """Return the objects of a kind; NotFound says what to install if the cluster does not know the kind."""
    try:
        return cluster.objects(kind, namespace)
    except NotFound as error:
        raise NotFound(
            f"the cluster has no {kind.KIND.plural}: install the operator's chart, or use another context"
        ) from error


def subject(cluster: Cluster, text: str) -> Subject:
    """Return the object that ``NAME`` or ``KIND/NAME`` is; of a bare name the first in the order of `KINDS`."""
    word, slash, name = text.partition("/")
    if slash:
        if word.lower() not in KINDS:
            raise UserError(f'"{word}" is no kind: use round, fleet, validation or calibration', 2)
        return cluster.object(KINDS[word.lower()], name)
    errors = list[NotFound]()
    for kind in dict.fromkeys(KINDS.values()):
        try:
            return cluster.object(kind, text)
        except NamespaceMissing:
            raise
        except NotFound as error:
            errors.append(error)
    if missing := next((error for error in errors if isinstance(error, KindMissing)), None):
        raise missing
    raise NotFound(
        f'there is no round, fleet, validation or calibration "{text}" in the namespace "{cluster.namespace}": '
        "look with `kubectl poc status -A`"
    )


def evidence(
    cluster: Cluster, found: Subject, told: gateway_proxy.Forwarding | None = None, gateway: str | None = None
) -> Evidence:
    """Read what stands around an object: its fleet, pods and Events, the operator, and what pods tell.

    ``told`` is what a gateway has told of it: `forwarding`. ``gateway`` is what the option of that name says.
    """
    namespace = found.metadata.namespace
    fleet = _fleet(cluster, found)
    selector = str(fleet_selector(found.metadata.name) if isinstance(found, PoCFleet) else found.spec.pods)
    chat = read_chat(cluster, active_pods([found])) if isinstance(found, PoCRound) else {}
    pods = sorted(map(PodView.parse, cluster.items(core("pods", namespace), selector)), key=in_order)
    fleets = [one for one in (fleet, found) if isinstance(one, PoCFleet)]
    return Evidence(
        subject=found,
        now=now(),
        fleet=fleet,
        pods=pods,
        events=_events(cluster, found),
        chat=chat,
        logs=read_logs(cluster, loading_pods(fleets, pods, now())),
        operator=operator_trouble(cluster),
        forwarding=told,
        gateway=gateway,
    )


def _fleet(cluster: Cluster, found: Subject) -> PoCFleet | None:
    if isinstance(found, PoCFleet) or found.spec.fleet_ref is None:
        return None
    try:
        return cluster.object(PoCFleet, found.spec.fleet_ref.name, found.metadata.namespace)
    except NotFound:
        return None  # the round's own condition says so


def forwarding(cluster: Cluster, found: Subject, option: str | None) -> gateway_proxy.Forwarding | None:
    """Ask the gateway that ``--gateway`` names about a round, else the only one.

    Without the option it is None if there is none, or it may not or cannot be asked: `check` tells of that.
    """
    if not isinstance(found, PoCRound):
        return None
    try:
        return gateway_proxy.find(cluster, option, GATEWAY_SECONDS).forwarding(
            found.metadata.namespace, found.metadata.name, found.metadata.uid
        )
    except UserError:
        if option:
            raise
        return None


def _events(cluster: Cluster, found: Subject) -> list[Event]:
    try:
        bodies = cluster.items(
            core("events", found.metadata.namespace), fields=f"involvedObject.uid={found.metadata.uid}"
        )
    except Forbidden:
        return []
    return [Event.parse(body) for body in bodies]


def operator_trouble(cluster: Cluster) -> str:
    """Return what is wrong with the operator's Deployments; empty if one is well, or nobody may look."""
    try:
        found = deployments(cluster)
    except Forbidden:
        return ""
    return preflight.operator_trouble(found)


def deployments(cluster: Cluster) -> list[Object]:
    """Return the operator's Deployments, wherever they are."""
    return cluster.items("/apis/apps/v1/deployments", OPERATOR_SELECTOR)
