# SPDX-License-Identifier: Apache-2.0
"""The life of an object from its creation to its end, plan by plan, with pods that do what they are told."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation, Proof
from poc_operator.basic_auth import BasicAuth
from poc_operator.calibrations import plan as calibrations
from poc_operator.observed import Answer, PodReport, PodView
from poc_operator.planning.snapshot import AskPod, StartPod, Step
from poc_operator.rounds import plan as rounds
from poc_operator.rounds.snapshot import RoundSnapshot
from poc_operator.validations import plan as validations
from vllm_poc.wire.answers import ModelLimits, PowState, StatusResponse
from vllm_poc.wire.artifacts import Artifact, encode_vector
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse
from vllm_poc.wire.messages import InitGenerateRequest

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
YEAR = timedelta(days=366)
UID = "12345678-1234-1234-1234-123456789012"
PODS = 2

Body = dict[str, Any]


class Life:
    """One object, and two pods that serve its model. ``body`` is what the API server would store."""

    def __init__(self, kind: type[Resource], spec: Mapping[str, Any]) -> None:
        self.kind = kind
        metadata = {
            "name": "r",
            "namespace": "ns",
            "uid": UID,
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": NOW.isoformat(),
        }
        self.body: Body = {"metadata": metadata, "spec": dict(spec)}
        self.now = NOW
        self._pods = [
            PodView(name=f"p{i}", namespace="ns", uid=f"u{i}", ip="10.0.0.1", ready=True) for i in range(PODS)
        ]
        self._reports = {pod.uid: self._says(PowState.IDLE) for pod in self._pods}
        self._arriving: dict[str, PodReport] = {}
        self._measured: Mapping[int, Any] = {}

    def steps(self) -> Iterator[Step[Any]]:
        """Live: start, work, lose all pods, get them back, be suspended, resume, end by a deadline, outlive its TTL."""
        yield from (self.step() for _ in range(4))
        pods, self._pods = self._pods, []
        yield self.step()
        self._pods = pods
        yield from (self.step() for _ in range(2))
        self.body["spec"]["suspend"] = True
        yield from (self.step() for _ in range(2))
        self.body["spec"]["suspend"] = False
        yield from (self.step() for _ in range(3))
        self.now += YEAR
        self._pods = []
        self.body["spec"]["activeDeadlineSeconds"] = 1
        yield from (self.step() for _ in range(4))
        self.now += YEAR
        yield self.step()

    def step(self) -> Step[Any]:
        """Plan once, store what the plan wants, and let the pods do what they are told."""
        self.now += timedelta(seconds=2)
        step = self._plan()
        self.body["status"] = json.loads(json.dumps(step.status.stored()))
        # What is told now shows in the poll after the next.
        self._reports |= self._arriving
        self._arriving = {}
        for action in step.actions:
            if isinstance(action, StartPod):
                self._arriving[action.pod.uid] = self._computes(action.request)
            elif isinstance(action, AskPod):
                self._arriving[action.pod.uid] = self._answers(action.key, action.request)
        return step

    def _plan(self) -> Step[Any]:
        work: Any = self.kind.parse(self.body)
        seen: Any = {"work": work, "pods": self._pods, "reports": self._reports, "now": self.now}
        seen["find_other_rounds"] = tuple
        if isinstance(work, PoCRound):
            auth = BasicAuth("user", "password") if work.spec.callback_secret_ref is not None else None
            return rounds.plan(RoundSnapshot(**seen, callback_auth=auth))
        if isinstance(work, PoCValidation):
            return validations.plan(validations.ValidationSnapshot(**seen, proofs=self._proofs(work)))
        assert isinstance(work, PoCCalibration)
        step = calibrations.plan(calibrations.CalibrationSnapshot(**seen, measured=self._measured))
        self._measured = step.measured
        return step

    def _proofs(self, work: PoCValidation) -> list[Proof]:
        return work.spec.proofs.inline or [
            Proof(nonce=nonce, vector="AAAA" if work.spec.artifact else None, distance="1.3") for nonce in range(450)
        ]

    def _says(self, state: PowState, **fields: Any) -> PodReport:  # noqa: ANN401
        limits = ModelLimits(names=[self.body["spec"]["model"]["name"]], max_seq_len=2**20, hidden_size=4096)
        status = StatusResponse(status=state, state=state, session_id="s1", model=limits, **fields)
        return PodReport(status=status)

    def _computes(self, request: InitGenerateRequest) -> PodReport:
        start = request.start_index
        end = min(start + 100, request.slot.capacity, request.end_index or request.slot.capacity)
        counts: Body = {"start_index": start, "next_index": end, "delivered_index": end, "delivered_valid": end - start}
        totals: Body = {"total_checked": end - start, "total_valid": end - start, "rate_per_second": 50.0}
        return self._says(PowState.GENERATING, round_id=UID, end_index=request.end_index, **counts, **totals)

    def _answers(self, key: str, request: GenerateRequest) -> PodReport:
        result: GeneratedResponse | ValidatedResponse
        nonces = request.nonces
        if request.validation is not None:
            result = ValidatedResponse(
                request_id="r",
                n_total=len(nonces),
                n_mismatch=1,
                mismatch_nonces=nonces[:1],
                p_value=0.5,
                fraud_detected=False,
            )
        elif request.params is not None:
            vector = encode_vector([0.1] * request.params.k_dim)
            result = GeneratedResponse(
                request_id="r", artifacts=[Artifact(nonce=nonce, vector_b64=vector) for nonce in nonces]
            )
        else:
            distances = [1.3 + (nonce % 97) / 500 for nonce in nonces]
            result = GeneratedResponse(request_id="r", nonces=nonces, distances=distances)
        idle = self._says(PowState.IDLE)
        return PodReport(status=idle.status, answer=Answer(key=key, result=result))
