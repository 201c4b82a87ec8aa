# SPDX-License-Identifier: Apache-2.0
"""Rounds that check proofs or calibrate: their nonces are split into samples, and pods are asked for one each.

Nothing runs on in a pod when nobody waits for the answer. So a sample can be asked for again at any time, by
any operator process and of any pod.
"""

from poc_operator.model.conditions import Reason
from poc_operator.model.spec import Mode
from poc_operator.model.status import Outcome, RoundStatus, Sample, SlotState
from poc_operator.observed.pods import PodView
from poc_operator.rounds import calibration, validation
from poc_operator.rounds.eligibility import computes_other_work, usable_pods
from poc_operator.rounds.end import LIMITS, Rule, end_by, failed
from poc_operator.rounds.snapshot import AskPod, RoundEvent, Snapshot, Step
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse


def choose_samples(snapshot: Snapshot, step: Step) -> Step:
    """Split the nonces, once a pod can compute them."""
    if step.status.samples or step.status.stop_time or not usable_pods(snapshot):
        return step
    if snapshot.round.spec.mode is Mode.VALIDATE:
        return validation.choose(snapshot, step)
    return calibration.choose(snapshot, step)


def observe_samples(snapshot: Snapshot, step: Step) -> Step:
    """Take what the pods answered; a sample whose pod is gone or failed waits for another one."""
    seen = [_observe(snapshot, sample) for sample in step.status.samples]
    return step.extended(samples=[sample for sample, _ in seen], events=[event for _, event in seen if event])


def _observe(snapshot: Snapshot, sample: Sample) -> tuple[Sample, RoundEvent | None]:
    if not sample.state.active:
        return sample, None
    if snapshot.round.status.stop_time is not None:
        return _unbound(sample, SlotState.WAITING), None  # asked for again if the round goes on
    if snapshot.pod_of(sample) is None:
        return _lost(snapshot, sample, f"pod {sample.pod} is gone")
    answer = snapshot.report_of(sample).answer
    if answer is None or answer.key != _key(sample) or isinstance(snapshot.proofs, str):
        return sample, None
    if answer.result is None:
        return _lost(snapshot, sample, f"pod {sample.pod}: {answer.error}")
    return _done(snapshot, sample, answer.result)


def _done(
    snapshot: Snapshot, sample: Sample, result: GeneratedResponse | ValidatedResponse
) -> tuple[Sample, RoundEvent | None]:
    take = validation.take if snapshot.round.spec.mode is Mode.VALIDATE else calibration.take
    try:
        found = take(snapshot, sample, result)
    except ValueError as error:
        return _lost(snapshot, sample, f"pod {sample.pod}: {error}")
    return sample.model_copy(update={"state": SlotState.DONE, "error": None, **found}), None


def _lost(snapshot: Snapshot, sample: Sample, why: str) -> tuple[Sample, RoundEvent | None]:
    limit = snapshot.round.spec.reissue.limit_per_pod
    over = sample.attempts > limit
    if over:
        why += f"; spec.reissue.limitPerPod of {limit} is used up"
    lost = _unbound(sample, SlotState.FAILED if over else SlotState.WAITING).model_copy(update={"error": why})
    message = f"{sample.count} nonces from the {sample.first + 1}. on: {why}"
    return lost, RoundEvent(reason=Reason.WORK_LOST, message=message, warning=True)


def _unbound(sample: Sample, state: SlotState) -> Sample:
    return sample.model_copy(update={"state": state, "pod": None, "uid": None})


def bind_samples(snapshot: Snapshot, step: Step) -> Step:
    """Give each waiting sample a pod that has none."""
    if step.status.stop_time:
        return step
    taken = {sample.uid for sample in step.status.samples if sample.state.active}
    free = [pod for pod in usable_pods(snapshot) if pod.uid not in taken and not _busy(snapshot, pod)]
    return step.extended(samples=[_bind(sample, free) for sample in step.status.samples])


def _busy(snapshot: Snapshot, pod: PodView) -> bool:
    return computes_other_work(snapshot, snapshot.reports[pod.uid])


def _bind(sample: Sample, free: list[PodView]) -> Sample:
    if sample.state is not SlotState.WAITING or not free:
        return sample
    pod = free.pop(0)
    bound = {"state": SlotState.RUNNING, "pod": pod.name, "uid": pod.uid, "attempts": sample.attempts + 1}
    return sample.model_copy(update=bound)


def ask_pods(snapshot: Snapshot, step: Step) -> Step:
    """Ask each pod that has a sample for it, as long as there are the proofs to compare with."""
    if step.status.stop_time or isinstance(snapshot.proofs, str):
        return step
    asks = [
        AskPod(pod=pod, key=_key(sample), request=_request(snapshot, sample))
        for sample in step.status.samples
        if sample.state.active and (pod := snapshot.pod_of(sample)) is not None
    ]
    return step.extended(actions=asks)


def _key(sample: Sample) -> str:
    return f"sample {sample.first} attempt {sample.attempts}"


def _request(snapshot: Snapshot, sample: Sample) -> GenerateRequest:
    if snapshot.round.spec.mode is Mode.VALIDATE:
        return validation.request(snapshot, sample)
    return calibration.request(snapshot.round, sample)


def conclude(snapshot: Snapshot, step: Step) -> Step:
    """Work out the result when all samples are done."""
    samples = step.status.samples
    if not samples or any(sample.state is not SlotState.DONE for sample in samples):
        return step
    if snapshot.round.spec.mode is Mode.VALIDATE:
        return step.extended(verdict=validation.verdict(snapshot.round.spec, samples))
    return step.extended(calibration=calibration.result(snapshot.round.spec, samples))


def samples_failed(_: Snapshot, status: RoundStatus) -> Outcome | None:
    """A sample was given up: no result would be about all nonces."""
    given_up = next((sample for sample in status.samples if sample.state is SlotState.FAILED), None)
    if given_up is None:
        return None
    return failed(Reason.REISSUE_LIMIT_EXCEEDED, given_up.error or "a sample was given up")


RULES: tuple[Rule, ...] = (
    validation.proofs_changed,
    validation.proofs_checked,
    calibration.calibrated,
    samples_failed,
    *LIMITS,
)


def end_sampling(snapshot: Snapshot, step: Step) -> Step:
    """End a round that checks or calibrates when it is done, or will never be."""
    return end_by(RULES, snapshot, step)
