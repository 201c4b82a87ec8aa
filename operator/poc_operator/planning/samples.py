# SPDX-License-Identifier: Apache-2.0
"""Work on named nonces: they are split into samples, and each pod is asked for one at a time.

What validations and calibrations do alike stands here; what they ask and make of the answers stands in their plans.

Nothing runs on in a pod when nobody waits for the answer. So a sample can be asked for again at any time, by
any operator process and of any pod.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from poc_operator.apis.v1alpha1.calibration import CalibrationSample, PoCCalibration
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.status import Outcome, SlotState, WorkStatus
from poc_operator.apis.v1alpha1.validation import PoCValidation, Sample
from poc_operator.observed import Answer, PodReport, PodView
from poc_operator.planning import lifecycle
from poc_operator.planning.conditions import tell_pods
from poc_operator.planning.eligibility import computes_other_work, holder, usable_pods
from poc_operator.planning.snapshot import AskPod, Snapshot, Step, Work, WorkEvent
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse

#: The kinds whose pods are asked for named nonces.
NamedNonces = PoCValidation | PoCCalibration
AnySample = Sample | CalibrationSample
SampleT = TypeVar("SampleT", Sample, CalibrationSample)
StepT = TypeVar("StepT", bound=Step[Any])
PodResult = GeneratedResponse | ValidatedResponse
#: What a result makes of its sample. ValueError if it is about something else.
Take = Callable[[SampleT, PodResult], SampleT]


def observe_samples(
    snapshot: Snapshot[NamedNonces], samples: Iterable[SampleT], take: Take[SampleT] | None
) -> tuple[list[SampleT], list[WorkEvent]]:
    """Take what the pods answered; a sample whose pod is gone or failed waits for another one.

    Without ``take`` answers are left for later: there is nothing to compare them with yet.
    """
    seen = [_observe(snapshot, sample, take) for sample in samples]
    return [sample for sample, _ in seen], [event for _, event in seen if event]


def _observe(
    snapshot: Snapshot[NamedNonces], sample: SampleT, take: Take[SampleT] | None
) -> tuple[SampleT, WorkEvent | None]:
    if not sample.state.active:
        return sample, None
    if snapshot.work.status.stop_time is not None:
        return _unbound(sample, SlotState.WAITING), None  # asked for again if the work goes on
    if snapshot.pod_of(sample) is None:
        return _lost(snapshot, sample, f"pod {sample.pod} is gone")
    report = snapshot.report_of(sample)
    answer = report.answer
    if answer is None or take is None or answer.key != _key(sample):
        # A round has taken the pod, which would answer after that: the request is withdrawn.
        return (_put_back(snapshot, sample, report) if computes_other_work(snapshot, report) else sample), None
    try:
        taken = _taken(sample, answer, take)
    except ValueError as error:
        return _lost(snapshot, sample, f"pod {sample.pod}: {error}")
    return taken.model_copy(update={"state": SlotState.DONE, "error": None}), None


def _put_back(snapshot: Snapshot[NamedNonces], sample: SampleT, report: PodReport) -> SampleT:
    """Return a sample that its pod has no time for: it waits for a free pod, and nothing of it is lost."""
    why = f"pod {sample.pod} computes {holder(snapshot, report)}"
    return _unbound(sample, SlotState.WAITING).model_copy(update={"attempts": sample.attempts - 1, "error": why})


def _taken(sample: SampleT, answer: Answer, take: Take[SampleT]) -> SampleT:
    if answer.result is None:
        raise ValueError(answer.error)
    return take(sample, answer.result)


def _lost(snapshot: Snapshot[NamedNonces], sample: SampleT, why: str) -> tuple[SampleT, WorkEvent | None]:
    limit = snapshot.work.spec.retry.backoff_limit_per_sample
    over = sample.attempts > limit
    if over:
        why += f"; spec.retry.backoffLimitPerSample of {limit} is used up"
    lost = _unbound(sample, SlotState.FAILED if over else SlotState.WAITING).model_copy(update={"error": why})
    message = f"{sample.count} nonces from the {sample.first + 1}. on: {why}"
    return lost, WorkEvent(reason=Reason.WORK_LOST, message=message, warning=True)


def _unbound(sample: SampleT, state: SlotState) -> SampleT:
    return sample.model_copy(update={"state": state, "pod": None, "uid": None})


def bind_samples(snapshot: Snapshot[Work], samples: Sequence[SampleT]) -> list[SampleT]:
    """Give each waiting sample a pod that has none."""
    taken = {sample.uid for sample in samples if sample.state.active}
    free = [pod for pod in usable_pods(snapshot) if pod.uid not in taken and not _busy(snapshot, pod)]
    return [_bind(sample, free) for sample in samples]


def _busy(snapshot: Snapshot[Work], pod: PodView) -> bool:
    return computes_other_work(snapshot, snapshot.reports[pod.uid])


def _bind(sample: SampleT, free: list[PodView]) -> SampleT:
    if sample.state is not SlotState.WAITING or not free:
        return sample
    pod = free.pop(0)
    bound = {"state": SlotState.RUNNING, "pod": pod.name, "uid": pod.uid, "attempts": sample.attempts + 1}
    return sample.model_copy(update=bound)


def ask_pods(
    snapshot: Snapshot[Work], samples: Iterable[SampleT], request: Callable[[SampleT], GenerateRequest]
) -> list[AskPod]:
    """Ask each pod that has a sample for it."""
    return [
        AskPod(pod=pod, key=_key(sample), request=request(sample))
        for sample in samples
        if sample.state.active and (pod := snapshot.pod_of(sample)) is not None
    ]


def _key(sample: AnySample) -> str:
    return f"sample {sample.first} attempt {sample.attempts}"


def may_split(snapshot: Snapshot[NamedNonces], step: Step[Any]) -> bool:
    """Whether the work is to be split into samples: once, when a pod can compute them."""
    return not step.status.shares and not step.status.stop_time and bool(usable_pods(snapshot))


def note_times(snapshot: Snapshot[NamedNonces], step: StepT) -> StepT:
    """Record since when it runs, and since when nobody answers."""
    samples: Sequence[AnySample] = step.status.samples
    extent = f"{sum(sample.count for sample in samples)} nonces in {len(samples)} samples"
    started = _started(samples, snapshot.work.status.samples)
    works = any(sample.state is SlotState.RUNNING for sample in samples)
    return lifecycle.note_times(snapshot, step, started=started, works=works, extent=extent)


def _started(samples: Iterable[AnySample], before: Iterable[AnySample]) -> bool:
    """Whether a pod computes, or has answered since the last plan, before anybody saw it compute.

    What was done ``before`` says nothing: suspended work starts anew.
    """
    known = {sample.first for sample in before if sample.state is SlotState.DONE}
    return any(
        sample.state is SlotState.RUNNING or (sample.state is SlotState.DONE and sample.first not in known)
        for sample in samples
    )


def count_samples(snapshot: Snapshot[NamedNonces], step: StepT) -> StepT:
    """Fill in what ``kubectl get`` shows of samples of either kind."""
    samples: Sequence[AnySample] = step.status.samples
    done = [sample for sample in samples if sample.state is SlotState.DONE]
    step = step.extended(
        nonces=sum(sample.count for sample in samples),
        checked=sum(sample.count for sample in done),
        not_computed=sum(sample.not_computed for sample in done),
        retries=sum(max(0, sample.attempts - 1) for sample in samples),
    )
    return lifecycle.tally(snapshot, step)


def pace(snapshot: Snapshot[NamedNonces], step: Step[Any]) -> str:
    """Say how the work gets on."""
    samples: Sequence[AnySample] = step.status.samples
    pods = tell_pods(snapshot, (sample for sample in samples if sample.state.active))
    return f"{pods}; {step.status.checked} of {sum(sample.count for sample in samples)} nonces are done"


def samples_failed(_: Snapshot[Work], status: WorkStatus) -> Outcome | None:
    """A sample was given up: no result would be about all nonces."""
    given_up = next((share for share in status.shares if share.state is SlotState.FAILED), None)
    if given_up is None:
        return None
    return lifecycle.failed(Reason.BACKOFF_LIMIT_EXCEEDED, given_up.error or "a sample was given up")
