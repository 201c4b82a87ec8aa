# SPDX-License-Identifier: Apache-2.0
"""What the operator sees: pods, what they report, and what the gateway has. Data only.

Clients make it, plans read it. What is stored in the API server does not belong here but into ``apis``; how things
are asked belongs into ``clients``. Names that the gateway sends are snake_case on the wire, as all that pods say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from poc_operator.basic_auth import BasicAuth
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.generate import GeneratedResponse, ValidatedResponse
from vllm_poc.wire.messages import Scheme, ShortText
from vllm_poc.wire.partition import MAX_NONCE

#: What the error of a pod begins with that has refused the operator's token. Other servers say less.
UNAUTHORIZED = "HTTP 401, Unauthorized"
#: Kubernetes' label of a StatefulSet's pods with the revision of the template that they were made from.
REVISION_LABEL = "controller-revision-hash"


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container of a pod. ``id`` changes with every restart.

    ``ended`` says why it does not run, in the kubelet's words; empty while it does. ``last_end`` is how it ended last,
    if it ever did. ``startup_seconds`` is how long its startup probe lets it start, and ``started`` whether that
    probe has passed; None without such a probe. ``model`` is what its arguments let vLLM load: `served_model`.
    ``http_port`` is the one of its ports that is named http.
    """

    id: str
    name: str = ""
    ports: frozenset[int] = frozenset()
    http_port: int | None = None
    restarts: int = 0
    ended: str = ""
    last_end: str = ""
    running_since: datetime | None = None
    startup_seconds: int | None = None
    started: bool = True
    model: str = ""


class Owner(NamedTuple):
    """What keeps a pod and makes it anew: the one of its owners that is its controller."""

    kind: str
    name: str
    uid: str

    @classmethod
    def parse(cls, meta: Mapping[str, Any]) -> Self | None:
        """Read an object's metadata; None if nothing keeps it."""
        found = next((one for one in meta.get("ownerReferences") or [] if one.get("controller")), None)
        return cls(found["kind"], found["name"], found["uid"]) if found is not None else None


@dataclass(frozen=True, kw_only=True)
class PodView:
    """The few facts about a pod that matter to a round."""

    name: str
    namespace: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: Owner | None = None
    ip: str | None = None
    ready: bool = False
    gone: bool = False  # deleted, or all that ran in it has ended for good
    terminating: bool = False  # being deleted: it may run on for its grace period, or until its node is back
    disrupted: bool = False  # ended by the cluster: evicted, preempted, its node drained or lost
    waiting_for: str = ""  # why it is not ready, in the kubelet's words
    waiting_message: str = ""  # what is told of that, as by a registry: of any length, and not fit to be shown
    containers: Sequence[Container] = ()
    node: str = ""  # the Kubernetes node that it was given to
    sandboxed: bool = False  # its volumes and its network are there: only images and containers are missing
    created: datetime | None = None
    scheduled: datetime | None = None  # when it was given to its Kubernetes node
    taken: datetime | None = None  # when the kubelet there took it
    ready_since: datetime | None = None  # of its last change to ready; None while it is not
    not_ready_since: datetime | None = None  # since when it is not, or was never; None while it is
    #: Why it takes no new slot, as its fleet says, and whether it has failed the self-check. The API server tells
    #: neither: the controller sets them for plans.
    barred: str = ""
    failed_check: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Build a view from the API server's JSON."""
        meta, status = body["metadata"], body.get("status") or {}
        conditions = {c["type"]: c for c in status.get("conditions") or []}
        ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
        waiting_for, waiting_message = _waiting_for(status, conditions)
        return cls(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta["uid"],
            labels=meta.get("labels") or {},
            owner=Owner.parse(meta),
            ip=status.get("podIP"),
            ready=ready.get("status") == "True",
            gone=status.get("phase") in ("Succeeded", "Failed") or ("deletionTimestamp" in meta and _has_ended(status)),
            terminating="deletionTimestamp" in meta,
            disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
            waiting_for=waiting_for,
            waiting_message=waiting_message,
            containers=_containers(body.get("spec") or {}, status),
            node=(body.get("spec") or {}).get("nodeName") or "",
            sandboxed=conditions.get("PodReadyToStartContainers", {}).get("status") == "True",
            created=_moment(meta.get("creationTimestamp")),
            scheduled=_moment(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
            taken=_taken(meta, status),
            ready_since=_moment(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
            not_ready_since=_moment(ready.get("lastTransitionTime")) if ready.get("status") != "True" else None,
        )

    @property
    def revision(self) -> str:
        """The revision of its StatefulSet's template that it was made from; empty if it has no StatefulSet."""
        return self.labels.get(REVISION_LABEL, "")

    @property
    def stays(self) -> bool:
        """Whether the pod exists and is not on its way out."""
        return not self.gone and not self.terminating

    @property
    def http_port(self) -> int | None:
        """The port named http of its first container that has one."""
        return next((one.http_port for one in self.containers if one.http_port is not None), None)

    def serving_port(self, told: int) -> int:
        """Return the port of its server: the one that is told, unless the pod declares others alone.

        Pods serve on when the port of their fleet changes. Of others the one named http counts, or the least of the
        first container that declares any.
        """
        declared = [container.ports for container in self.containers if container.ports]
        if not declared or any(told in ports for ports in declared):
            return told
        return self.http_port or min(declared[0])

    def container(self, port: int) -> Container:
        """Return the container that serves ``port``: the first one, if none declares the port."""
        declaring = [container for container in self.containers if port in container.ports]
        return (declaring or [*self.containers, Container(id=self.uid)])[0]

    def server(self, port: int) -> str:
        """Return the id of the container that serves ``port``."""
        return self.container(port).id

    def loads_until(self, port: int, default_seconds: int) -> datetime | None:
        """Return until when the server may load its model; None if it does not load.

        It loads while its container runs and is not ready, as long as its startup probe allows. Without such a probe
        that is ``default_seconds``.
        """
        server = self.container(port)
        if not self.stays or self.ready or server.ended or server.running_since is None:
            return None
        if server.startup_seconds is None:
            return server.running_since + timedelta(seconds=default_seconds)
        return None if server.started else server.running_since + timedelta(seconds=server.startup_seconds)


_LAST_WORDS = 200  # so much of a container's last line is told


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def is_container_session(session: str | None) -> bool:
    """Whether a session is a container's id, as that of a pod whose server has no sessions: `Container.id`."""
    return session is not None and "#" in session


def _taken(meta: Mapping[str, Any], status: Mapping[str, Any]) -> datetime | None:
    """Return when a kubelet took the pod; its creation, if it tells of containers and not when it took them."""
    return _moment(status.get("startTime") or (status.get("containerStatuses") and meta.get("creationTimestamp")))


def _has_ended(status: Mapping[str, Any]) -> bool:
    """Whether the kubelet says of every container that it has ended. One that is being deleted starts none again."""
    containers = status.get("containerStatuses") or []
    return bool(containers) and all("terminated" in (container.get("state") or {}) for container in containers)


def _containers(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[Container, ...]:
    """Return the containers in the order of the spec."""
    statuses = {found["name"]: found for found in status.get("containerStatuses") or []}
    return tuple(_container(one, statuses.get(one["name"], {})) for one in spec.get("containers") or [])


def _container(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Container:
    state = status.get("state") or {}
    return Container(
        id=_container_id(status),
        name=spec["name"],
        ports=_ports(spec),
        http_port=next((port["containerPort"] for port in spec.get("ports") or [] if port.get("name") == "http"), None),
        restarts=status.get("restartCount", 0),
        ended=_why_ended(state),
        last_end=_how_ended(state.get("terminated") or (status.get("lastState") or {}).get("terminated")),
        running_since=_moment((state.get("running") or {}).get("startedAt")),
        startup_seconds=_startup_seconds(spec.get("startupProbe")),
        started=bool(status.get("started", True)),
        model=served_model(spec.get("args") or []),
    )


def _why_ended(state: Mapping[str, Any]) -> str:
    for kind in ("waiting", "terminated"):
        if state.get(kind) is not None:
            return str(state[kind].get("reason") or kind.capitalize())
    return ""


def _how_ended(terminated: Mapping[str, Any] | None) -> str:
    """Return in one line how a container ended: the kubelet's reason, the exit code, its last words."""
    if not terminated:
        return ""
    words = str(terminated.get("message") or "").strip().splitlines()
    code = f"{terminated.get('reason') or 'Terminated'}, exit code {terminated.get('exitCode', 0)}"
    return f"{code}: {words[-1].strip()[:_LAST_WORDS]}" if words else code


def _startup_seconds(probe: Mapping[str, Any] | None) -> int | None:
    """Return how long a startup probe lets its container start; the defaults are Kubernetes'."""
    if probe is None:
        return None
    tries = int(probe.get("failureThreshold", 3)) * int(probe.get("periodSeconds", 10))
    return int(probe.get("initialDelaySeconds", 0)) + tries


_REVISION_FLAG = "--revision"


def served_model(args: Sequence[str]) -> str:
    """Return what vLLM's arguments let it load, as `MODEL` or `MODEL@REVISION`; empty if they do not begin with it."""
    if not args or args[0].startswith("-"):
        return ""
    revision = ""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        flag, equals, value = arg.partition("=")
        if flag == _REVISION_FLAG:
            revision = value if equals else following
    return f"{args[0]}@{revision}" if revision else args[0]


def _container_id(status: Mapping[str, Any]) -> str:
    return f"{status.get('containerID', '')}#{status.get('restartCount', 0)}"


def _ports(container: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(port["containerPort"] for port in container.get("ports") or [])


#: What containers wait for before anything can have gone wrong with them.
_BEGINNING = ("ContainerCreating", "PodInitializing")


def _waiting_for(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Return the most telling reason why a pod is not ready, with its message: image, crash, scheduling, readiness."""
    # While an init container cannot run, all others only wait for it.
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    waits = [waiting for one in containers if (waiting := (one.get("state") or {}).get("waiting"))]
    if waits:
        found = next((one for one in waits if one.get("reason") not in _BEGINNING), waits[0])
        return str(found.get("reason", "ContainerWaiting")), str(found.get("message") or "")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason") or "Unschedulable"), ""
    ready = conditions.get("Ready", {})
    return (str(ready.get("reason", "Pending")) if ready.get("status") != "True" else ""), ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a pod answered when it was asked for named nonces under this key: a result, or what went wrong."""

    key: str
    result: GeneratedResponse | ValidatedResponse | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class PodReport:
    """What one poll of a pod yielded: its status, or why there is none.

    ``started`` is the session in which the pod accepted the last start; ``refusal`` its answer, as (reason, message),
    if it declined, ``start_error`` what went wrong otherwise. ``stalled_seconds`` is how long it has computed without
    progress that chat or a failing receiver would explain, ``silent_seconds`` how long it has not answered.
    ``undelivered_seconds`` is how long it has told of an error while its receiver accepted nothing.
    ``batch_nonces`` is by how much its index has moved at most from one poll to the next, ``batch_seconds`` the longest
    time from one move to the next: a pod that computes in batches does not move within one. Both are 0 until it moves.
    ``in_flight`` says that it was told something whose outcome is not known yet, ``resumes`` whether it can begin a
    slot elsewhere than at index 0. ``answer`` is its last one about named nonces. ``told_auth`` is what this process
    last told it for the receiver, and it took. ``spared`` says that it has lately refused a start for which other work
    was stopped, so that none is stopped to ask it again. ``schemes`` are those of artifacts that it offers, None if it
    was not asked or did not tell. ``listens`` is False if nothing answered on the port, or something that does not
    speak the protocol. ``heard`` says whether it has answered since this process first looked at the round.
    """

    status: StatusResponse | None = None
    error: str | None = None
    started: str | None = None
    refusal: tuple[str, str] | None = None
    start_error: str | None = None
    stalled_seconds: float = 0.0
    silent_seconds: float = 0.0
    undelivered_seconds: float = 0.0
    batch_nonces: int = 0
    batch_seconds: float = 0.0
    in_flight: bool = False
    spared: bool = False
    resumes: bool = True
    answer: Answer | None = None
    told_auth: BasicAuth | None = None
    schemes: frozenset[Scheme] | None = None
    listens: bool = True
    heard: bool = False

    @property
    def leases(self) -> bool:
        """Whether the pod says that it knows leases."""
        return self.status is not None and self.status.leases


class _FromGateway(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Count = Annotated[int, Field(ge=0, lt=2**63)]


class Rivals(_FromGateway):
    """Two pods of one slot that delivered different results: ``kept`` came first. None if a pod is not known.

    ``nonce`` is the first of ``count`` nonces.
    """

    kept: ShortText | None
    other: ShortText | None
    nonce: Count
    count: Count


class RefusedPod(_FromGateway):
    """A pod of ``slot``, and how many deliveries of it no pod of the slot may send; ``why`` is about the last."""

    slot: Count
    pod: ShortText
    count: Count
    why: ShortText


class CollectedSlot(_FromGateway):
    """One slot; ``slot`` is its first nonce.

    ``last_nonce`` is the largest nonce stored, -1 without any. Every index before ``delivered_index`` is stored; in the
    distance protocol, whose results are delivered below the target alone, it is the one after ``last_nonce``.
    ``duplicates`` and ``conflicts`` count deliveries of nonces that were stored already, with the same and with other
    content; ``forwarded`` what the round's receiver has accepted.
    """

    slot: Count
    stored: Count
    last_nonce: Annotated[int, Field(ge=-1, le=MAX_NONCE)]
    delivered_index: Count
    duplicates: Count
    conflicts: Count
    forwarded: Count
    rivals: list[Rivals] = Field(default_factory=list)


#: Results beside the stored one that are told of a nonce at once.
MOST_OTHERS = 20


class Truth(StrEnum):
    """Which of two results for a nonce is honest: the stored one, its rival, none of them, or both."""

    STORED = "stored"
    OTHER = "other"
    NEITHER = "neither"
    BOTH = "both"


class RivalResult(_FromGateway):
    """One of several results for a nonce; ``conflict`` is its id if it is not the stored one."""

    conflict: Count | None = None
    pod: ShortText | None = None
    vector_b64: str | None = None
    distance: float | None = None


class RivalNonce(_FromGateway):
    """A nonce for which pods delivered different results, and nobody has found the honest one yet."""

    nonce: Annotated[int, Field(ge=0, le=MAX_NONCE)]
    stored: RivalResult
    others: Annotated[list[RivalResult], Field(min_length=1, max_length=MOST_OTHERS)]


class RivalPage(_FromGateway):
    """The first such nonces of a round."""

    rivals: list[RivalNonce]


class Decision(BaseModel):
    """What ``pod``, which delivered none of them, has computed for a nonce with several results.

    ``truth`` is OTHER with the honest result's ``conflict``, NEITHER, or STORED; ``alike`` are the conflicts that
    differ from the honest result no more than GPUs do. Those with ids above ``up_to`` were not compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonce: Annotated[int, Field(ge=0, le=MAX_NONCE)]
    truth: Truth
    conflict: Count | None = None
    alike: list[Count] = Field(default_factory=list, max_length=MOST_OTHERS)
    up_to: Count
    pod: ShortText

    @model_validator(mode="after")
    def _names_the_honest_one(self) -> Self:
        if (self.conflict is not None) != (self.truth is Truth.OTHER):
            raise ValueError(
                f"conflict: name the honest result's with truth {Truth.OTHER}, and none with another truth"
            )
        if self.conflict is not None and self.conflict > self.up_to:
            raise ValueError(f"conflict: {self.conflict} is above up_to, {self.up_to}: name one that was compared")
        return self


class Forger(_FromGateway):
    """A pod, and how many of its results were found not to be honest."""

    pod: ShortText
    count: Count


class CollectedRound(_FromGateway):
    """A round, and the sums over its slots. ``refused`` are pods that delivered what they must not.

    ``undecided`` are results with rivals of which nobody knows which is honest, ``forgers`` pods whose were not.
    ``limit_reached`` says which limit keeps the gateway from storing more; None if it stores. ``forwarding_error`` is
    the receiver's address and why it did not take the last results, None while it does, and ``waiting`` what it lacks.
    """

    uid: str
    stored: Count
    duplicates: Count
    conflicts: Count
    forwarded: Count
    slots: list[CollectedSlot]
    refused: list[RefusedPod] = Field(default_factory=list)
    undecided: Count = 0
    forgers: list[Forger] = Field(default_factory=list)
    limit_reached: ShortText | None = None
    forwarding_error: ShortText | None = None
    waiting: Count = 0


@dataclass(frozen=True, kw_only=True)
class GatewayReport:
    """Where the round's pods deliver to, and what of it is stored.

    ``collected`` is what the gateway answered last, None if it had nothing then; ``asked`` is when that question was
    put, None if none was answered yet, and ``heard`` what pods had told before it, by their uids. ``error`` says why
    the last question was not answered. ``rivals`` are nonces that wait for a decision. ``fallen`` are slots, by their
    first nonces, of which it has fewer results than it had told, for the plan that first sees it. ``failing_since`` is
    since when the round's receiver has taken nothing, None while it takes results.
    """

    callback: str
    collected: CollectedRound | None = None
    asked: datetime | None = None
    error: str | None = None
    rivals: Sequence[RivalNonce] = ()
    heard: Mapping[str, StatusResponse] = field(default_factory=dict)
    fallen: frozenset[int] = frozenset()
    failing_since: datetime | None = None
