# SPDX-License-Identifier: Apache-2.0
"""``status.pods`` of a fleet: which pods are asked for a self-check, what their answers mean, and whom they bar.

A result is about one server, that is one start of a pod's container. It lasts until the server's next answer, so that
a check which cannot be made bars no pod that has passed before. If what it was judged by changes, as in a preset, an
answer that is known is judged anew. Else the pod is asked again, and its result stays until then::

    Pending ── the server answers ──> Passed, Failed
       ^                                 │
       └─────── the server restarts ─────┘
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import Any

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import (
    CHECK_K_DIM,
    CHECK_SEQ_LEN,
    MAX_CHECK_NUMBERS,
    CheckResult,
    Fingerprint,
    FleetPod,
    SelfCheckReference,
)
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.validation import StatTest, Thresholds
from poc_operator.fleets.resolve import Resolved
from poc_operator.fleets.self_check import (
    Check,
    Comparison,
    Vectors,
    is_incomplete,
    judge,
    lacks,
    packed,
    unpacked,
)
from poc_operator.fleets.strangers import is_stranger, keeper_of
from poc_operator.observed import PodView, served_model
from poc_operator.planning.eligibility import named
from poc_operator.planning.snapshot import in_order
from vllm_poc.wire.messages import Protocol

#: How the message of a pod begins whose server cannot be asked, or does not answer.
CANNOT_CHECK = "the pod cannot be checked: "
_UNUSABLE = "the fleet's spec cannot be used"


@dataclass(frozen=True, kw_only=True)
class CheckAnswer:
    """What a pod's server answered to a check, by the check's name; ``error`` says why it has not."""

    server: str
    check: str
    time: datetime
    vectors: Vectors | None = None
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckPod:
    """Ask a pod for a check. Its answer is about this server."""

    pod: PodView
    port: int
    server: str
    check: Check


@dataclass(frozen=True, kw_only=True)
class CheckedPods:
    """What the status says of pods and references, and which pods are to be asked."""

    pods: Sequence[FleetPod]
    references: Sequence[SelfCheckReference] = ()
    asks: Sequence[CheckPod] = ()

    @property
    def failed(self) -> Sequence[FleetPod]:
        """Pods that compute something else."""
        return [pod for pod in self.pods if pod.result == CheckResult.FAILED]

    @property
    def pending(self) -> Sequence[FleetPod]:
        """Pods that have neither passed nor failed."""
        return [pod for pod in self.pods if pod.result not in (CheckResult.PASSED, CheckResult.FAILED)]


def check_pods(
    fleet: PoCFleet,
    resolved: Resolved | None,
    pods: Sequence[PodView],
    answers: Mapping[str, CheckAnswer],
    now: datetime,
) -> CheckedPods:
    """Judge what pods have answered so far, by their uids, and choose those to ask. ``pods`` are those that stay.

    Without ``resolved`` it is not known what pods are to compute: what was found so far stays. Where it is from the
    status, pods are compared with a reference of the status alone: the preset may have vectors, or make another one.
    """
    told = {entry.uid: entry for entry in fleet.status.pods}
    views = [
        _View.of(fleet, resolved, pod, told.get(pod.uid), answers.get(pod.uid)) for pod in sorted(pods, key=in_order)
    ]
    if not fleet.spec.self_check.enabled:
        return CheckedPods(pods=[_told(view, "it is not checked: selfCheck.enabled is false") for view in views])
    wanted = _check(fleet, resolved, "")
    known: dict[str, SelfCheckReference | None] = {found.name: found for found in fleet.status.self_check_references}
    groups: dict[str, list[_View]] = {}
    for view in views:
        if isinstance(view.check, Check):
            groups.setdefault(view.check.name, []).append(view)
    judged: dict[str, _View] = {}
    yardsticks = {name: _Yardstick.of(fleet, resolved, group[0].check, wanted) for name, group in groups.items()}
    for name, group in groups.items():
        if any(view.has_news or (view.vectors is not None and yardsticks[name].is_other(view.entry)) for view in group):
            found, known[name] = _judged(yardsticks[name], group, known.get(name))
            judged |= {view.pod.uid: view for view in found}
    views = [_explained(judged.get(view.pod.uid, view)) for view in views]
    used = {*groups, *(view.entry.reference for view in views)}
    # What the fleet's pods are to compute outlives them: the next pod may be the only one, and the wrong one.
    used |= {wanted.name} if isinstance(wanted, Check) and not _is_remembered(resolved) else known.keys()
    return CheckedPods(
        pods=[view.entry for view in views],
        references=[found for name, found in known.items() if name in used and found is not None],
        asks=[ask for view in views if (ask := _ask(fleet, view, known, yardsticks, now)) is not None],
    )


@dataclass(frozen=True, kw_only=True)
class _View:
    """One pod: what the status says of its server, what it is to compute or why not, and its answer to that."""

    pod: PodView
    port: int
    entry: FleetPod
    check: Check | str
    answer: CheckAnswer | None = None

    @classmethod
    def of(
        cls,
        fleet: PoCFleet,
        resolved: Resolved | None,
        pod: PodView,
        told: FleetPod | None,
        answer: CheckAnswer | None,
    ) -> "_View":
        port = pod.serving_port(fleet.spec.port)
        server = pod.server(port)
        check = _check(fleet, resolved, pod.container(port).model)
        if isinstance(check, Check) and _is_remembered(resolved):
            references = {found.name for found in fleet.status.self_check_references}
            check = check if check.name in references else _UNUSABLE
        if told is None or told.server != server:
            told = FleetPod(name=pod.name, uid=pod.uid, server=server)
        if answer is not None and (isinstance(check, str) or (answer.server, answer.check) != (server, check.name)):
            answer = None
        return cls(
            pod=pod,
            port=port,
            entry=told.model_copy(update={"revision": pod.revision}),
            check=check,
            answer=answer,
        )

    @property
    def vectors(self) -> Vectors | None:
        """What the server answered, as far as this process knows it."""
        return self.answer.vectors if self.answer is not None else None

    @property
    def has_news(self) -> bool:
        """Whether the status does not have the answer yet."""
        if self.answer is None or self.answer.vectors is None:
            return False
        checked = self.entry.checked_time
        return checked is None or self.answer.time > checked or self.entry.reference != self.answer.check

    def with_entry(self, **changes: Any) -> "_View":  # noqa: ANN401 - fields of the entry
        return replace(self, entry=self.entry.model_copy(update=changes))


@dataclass(frozen=True, kw_only=True)
class _Yardstick:
    """What pods of one check are judged by: the test's numbers, and the preset's vectors if it has some for the check.

    ``unfit`` says why vectors that it has are not used. ``digest`` tells one yardstick from another. It begins with
    that of the spec, and is no longer for pods of another model than the fleet's, as in an update, and while the preset
    cannot be used: of these the preset says nothing.
    """

    check: Check
    thresholds: Thresholds
    golden: SelfCheckReference | None = None
    unfit: str = ""
    digest: str = ""

    @classmethod
    def of(cls, fleet: PoCFleet, resolved: Resolved | None, check: Check | str, wanted: Check | str) -> "_Yardstick":
        assert isinstance(check, Check)  # noqa: S101 - for the type checker
        thresholds, (golden, unfit) = _thresholds(fleet, resolved), _golden(resolved, check)
        of_spec = _digest(fleet.spec.self_check.stat_test)
        if check != wanted or _is_remembered(resolved):
            return cls(check=check, thresholds=thresholds, golden=golden, digest=of_spec)
        of_preset = _digest(f"{thresholds} {unfit} {golden.vectors if golden is not None else ''}")
        return cls(check=check, thresholds=thresholds, golden=golden, unfit=unfit, digest=of_spec + of_preset)

    def is_other(self, entry: FleetPod) -> bool:
        """Whether a pod that was asked for the check was judged by something else, as far as this knows it."""
        return entry.reference == self.check.name and entry.judged_by[: len(self.digest)] != self.digest

    def mark(self, view: _View) -> _View:
        """Return a pod that was judged by this, whose message also says what this lacks."""
        message = f"{view.entry.message}; {self.unfit}" if self.unfit else view.entry.message
        return view.with_entry(judged_by=self.digest, message=message)


def _is_remembered(resolved: Resolved | None) -> bool:
    """Whether what pods serve is known by the status alone, which has no vectors of a preset."""
    return resolved is not None and resolved.remembered


def _digest(told: object) -> str:
    return sha256(str(told).encode()).hexdigest()[:8]


def _check(fleet: PoCFleet, resolved: Resolved | None, model: str) -> Check | str:
    """Return what a pod is to compute that loads this model, or why that cannot be said."""
    if resolved is None:
        return _UNUSABLE
    spec = fleet.spec.self_check
    seq_len, k_dim = spec.seq_len or resolved.seq_len or CHECK_SEQ_LEN, spec.k_dim or resolved.k_dim or CHECK_K_DIM
    if spec.nonces * k_dim > MAX_CHECK_NUMBERS:
        return f"selfCheck.nonces times kDim, {k_dim}, exceeds {MAX_CHECK_NUMBERS}: set fewer selfCheck.nonces"
    args = [resolved.model, *resolved.args, *(fleet.spec.engine_args or [])]
    return Check(model=model or served_model(args), seq_len=seq_len, k_dim=k_dim, nonces=spec.nonces)


def _told(view: _View, message: str) -> FleetPod:
    entry = view.entry
    return FleetPod(name=entry.name, uid=entry.uid, server=entry.server, revision=entry.revision, message=message)


def _explained(view: _View) -> _View:
    """Say of a pod without a result what its check waits for."""
    if view.entry.result in (CheckResult.PASSED, CheckResult.FAILED):
        return view
    if isinstance(view.check, str):
        why = view.check
    elif not view.pod.ready:
        why = "the pod is not ready"
    elif view.answer is not None and view.answer.error:
        why = f"{CANNOT_CHECK}{view.answer.error}"
    else:
        why = "the pod computes its nonces"
    return view.with_entry(message=why)


def _ask(
    fleet: PoCFleet,
    view: _View,
    references: Mapping[str, SelfCheckReference | None],
    yardsticks: Mapping[str, _Yardstick],
    now: datetime,
) -> CheckPod | None:
    """Return the question to a pod whose check is due; None if it is not, or cannot be asked."""
    entry, check, pod = view.entry, view.check, view.pod
    if isinstance(check, str) or not pod.ready or pod.ip is None:
        return None
    age = (now - entry.checked_time).total_seconds() if entry.checked_time is not None else None
    is_recent = age is not None and age < fleet.spec.self_check.interval_seconds and entry.reference == check.name
    reference = references.get(check.name)
    # Others have outvoted the reference that it was compared with.
    is_older = bool(reference and reference.time and entry.checked_time and entry.checked_time < reference.time)
    is_older = is_older or yardsticks[check.name].is_other(entry)
    # A pod that fails is asked again by a new process, which does not know whether others agree with it.
    if is_recent and (view.vectors is not None or (entry.result == CheckResult.PASSED and not is_older)):
        return None
    return CheckPod(pod=pod, port=view.port, server=entry.server, check=check)


def _judged(
    yardstick: _Yardstick, group: Sequence[_View], stored: SelfCheckReference | None
) -> tuple[Sequence[_View], SelfCheckReference | None]:
    """Return the pods of one check with what their answers mean, and the check's reference."""
    check, golden = yardstick.check, yardstick.golden
    reference = golden or stored
    answered = {view.pod.uid: view.vectors for view in group if view.vectors is not None}
    whole = {uid: vectors for uid, vectors in answered.items() if not is_incomplete(vectors)}
    partly = [_incomplete(view) for view in group if view.pod.uid in answered.keys() - whole.keys()]
    if not whole:
        return [yardstick.mark(view) for view in partly], stored
    heard = [view.entry for view in group if view.pod.uid not in answered]
    found = judge(
        whole,
        unpacked(reference.vectors, check.k_dim) if reference is not None else None,
        yardstick.thresholds,
        standing=sum(entry.result == CheckResult.PASSED and entry.reference == check.name for entry in heard),
        fixed=golden is not None,
    )
    views = {view.pod.uid: view for view in group}
    if found.source is not None:
        reference = _reference(check, views[found.source], found.reference)
    assert reference is not None  # noqa: S101 - for the type checker
    alone = len(group) - len(partly) == 1
    judged = [_compared(views[uid], result, reference, alone=alone) for uid, result in found.results.items()]
    return [yardstick.mark(view) for view in (*partly, *judged)], None if golden is not None else reference


def _thresholds(fleet: PoCFleet, resolved: Resolved | None) -> Thresholds:
    """Return the numbers of the test: the spec's, else those that the preset has for the model, else the defaults."""
    preset = resolved.stat_test if resolved is not None else StatTest()
    return fleet.spec.self_check.stat_test.or_else(preset).thresholds(Protocol.ARTIFACT)


def _golden(resolved: Resolved | None, check: Check) -> tuple[SelfCheckReference | None, str]:
    """Return the preset's vectors for a check, None if it has none for it, and why those that it has are not used."""
    golden = resolved.golden if resolved is not None else None
    if golden is None or resolved is None:
        return None, ""
    vectors = unpacked(golden.vectors, golden.k_dim)
    model = served_model([resolved.model, *resolved.args])
    has = Check(model=model, seq_len=golden.seq_len, k_dim=golden.k_dim, nonces=min(len(vectors), check.nonces))
    if has == check:
        return SelfCheckReference(name=check.name, vectors=packed(vectors[: check.nonces], check.k_dim)), ""
    theirs, ours = has.unlike(check), check.unlike(has)
    return None, f"the preset's vectors are not used: they are of {theirs}, and the check of {ours}"


def _reference(check: Check, view: _View, vectors: Vectors) -> SelfCheckReference:
    assert view.answer is not None  # noqa: S101 - it has answered
    return SelfCheckReference(
        name=check.name,
        vectors=packed(vectors, check.k_dim),
        pod=view.pod.name,
        time=view.answer.time,
        fingerprint=view.answer.fingerprint,
    )


def _incomplete(view: _View) -> _View:
    vectors = view.vectors or ()
    message = f"{lacks(vectors)} of {len(vectors)} nonces had no finite result: look at the pod's log and its GPUs"
    return _found(view, CheckResult.FAILED, message, None)


def _compared(view: _View, result: Comparison, reference: SelfCheckReference, *, alone: bool) -> _View:
    probability = f"{result.p_value:.6g}"
    if reference.pod == view.pod.name and not result.failed:
        message = "its vectors are the reference" + (": there was nothing to compare them with" if alone else "")
        return _found(view, CheckResult.PASSED, message, probability)
    whose = f"those of pod {reference.pod}" if reference.pod else "the preset's"
    figures = f"p-value {probability}, largest distance {result.farthest:.2g}, threshold {result.threshold:g}"
    counts = f"{result.mismatches} of {result.total} nonces differ from {whose} ({figures})"
    if not result.failed:
        return _found(view, CheckResult.PASSED, f"{counts}: the network would accept it", probability)
    answer = view.answer
    assert answer is not None  # noqa: S101 - it has answered
    unlike = _unlike(answer.fingerprint, reference.fingerprint) if reference.pod else []
    why = f"; {'; '.join(unlike)}" if unlike else "; what the pod tells of its server does not explain it"
    return _found(view, CheckResult.FAILED, f"{counts}: the network would vote it out{why}", probability)


def _found(view: _View, result: CheckResult, message: str, probability: str | None) -> _View:
    answer = view.answer
    assert answer is not None  # noqa: S101 - it has answered
    return view.with_entry(
        result=result,
        message=message,
        p_value=probability,
        checked_time=answer.time,
        reference=answer.check,
        fingerprint=answer.fingerprint,
    )


def _unlike(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Say in what a pod differs from the one that it is compared with."""
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in Fingerprint.model_fields)
    return [
        f"its {name} {'are' if name.endswith('s') else 'is'} {mine or 'unknown'}, not {theirs or 'unknown'}"
        for name, mine, theirs in pairs
        if mine != theirs
    ]


def with_bars(fleet: PoCFleet | None, pods: Iterable[PodView]) -> list[PodView]:
    """Return a fleet's pods, those that are to take no new slot with the reason. Without a fleet none is barred."""
    if fleet is None or not fleet.spec.self_check.enabled or fleet.metadata.deletion_timestamp is not None:
        return list(pods)
    known = {entry.uid: entry for entry in fleet.status.pods}
    return [_with_bar(fleet, pod, known.get(pod.uid)) for pod in pods]


def _with_bar(fleet: PoCFleet, pod: PodView, entry: FleetPod | None) -> PodView:
    if is_stranger(fleet.metadata.name, pod):
        return replace(pod, barred=f"self-check: the fleet checks its own pods alone ({keeper_of(pod)})")
    if entry is None or entry.server != pod.server(pod.serving_port(fleet.spec.port)):
        return replace(pod, barred="self-check: it has yet to be asked")
    if entry.result == CheckResult.PASSED:
        return pod
    failed = entry.result == CheckResult.FAILED
    return replace(pod, barred=f"self-check{' failed' if failed else ''}: {entry.message}", failed_check=failed)


def finding(checked: CheckedPods) -> tuple[Reason, str] | None:
    """Return what is wrong with the pods' checks, or what they wait for; None if all have passed."""
    failed, pending = checked.failed, checked.pending
    if failed:
        return (
            Reason.SELF_CHECK_FAILED,
            f"{len(failed)} of {len(checked.pods)} pods fail the self-check: {_named(failed)}",
        )
    if pending:
        return (
            Reason.SELF_CHECKS_PENDING,
            f"{len(pending)} of {len(checked.pods)} pods have yet to be checked: {_named(pending)}",
        )
    return None


def _named(pods: Sequence[FleetPod]) -> str:
    return named(pods, lambda pod: pod.message)
