# SPDX-License-Identifier: Apache-2.0
"""What the reconciler does differently for each kind: what is asked beside the pods, and which plan is made.

`PLANNERS` lists the kinds; everything else in this package is the same for all of them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import ConfigMapKey, PoCValidation, Proof, RoundSample
from poc_operator.basic_auth import BasicAuth
from poc_operator.calibrations import plan as calibrations
from poc_operator.clients.errors import GatewayError, StoreForbidden
from poc_operator.clients.gateway import GatewayClient
from poc_operator.clients.kube.callback_secret import CallbackSecretReader
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.fleet_refs import FleetRefs
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.controller.observing import GatewayObserver
from poc_operator.credentials import RATE_LIMIT
from poc_operator.leases import LEASE_SECONDS, Renewal
from poc_operator.observed import GatewayReport, PodReport
from poc_operator.planning.eligibility import takeable_pods
from poc_operator.planning.queue import as_other
from poc_operator.planning.snapshot import DecideRivals, OtherRound, Snapshot, Step, Work
from poc_operator.rounds import plan as rounds
from poc_operator.rounds.leaving import renewal
from poc_operator.rounds.snapshot import RoundSnapshot
from poc_operator.validations import plan as validations
from poc_operator.validations.plan import in_order, parse_proofs
from vllm_poc.wire.messages import Protocol

WorkT = TypeVar("WorkT", bound=Work)


#: Seconds after which the ConfigMap of a validation is read again, since a change of its proofs fails the validation.
PROOFS_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where kinds get what their plans need. Without ``gateway`` pods deliver to the rounds' own addresses.

    ``rate_limit`` is how many nonces per second no pod exceeds, ``owner`` the name under which pods get their orders,
    ``lease_seconds`` how long a pod computes on if nobody asks it. ``fleets`` finds what a ``fleetRef`` names.
    ``may_act`` says whether this process may give orders: whether it holds the Lease, where there is one.
    """

    store: ObjectStore
    gateway: GatewayClient | None = None
    rate_limit: int = RATE_LIMIT
    owner: str | None = None
    lease_seconds: int = LEASE_SECONDS
    fleets: FleetRefs | None = None
    may_act: Callable[[], bool] = lambda: True


class Planner(ABC, Generic[WorkT]):
    """Makes the plans of one object. What it remembers may be lost with the process."""

    resource: ClassVar[type[Work]]
    #: Whether the objects wait for pods in one queue.
    queues: ClassVar[bool] = False

    def __init__(self, sources: Sources, ref: ObjectRef, log: ObjectLogger) -> None:
        self._sources = sources
        self._ref = ref
        self._log = log

    async def ask(self, work: WorkT) -> None:
        """Ask what the plan needs beside the pods. It takes no longer than a poll."""

    async def compare(self, work: WorkT, reports: Mapping[str, PodReport]) -> None:
        """Ask what pods' reports, by their uids, are held against. It takes a moment."""

    def renewal(self, work: WorkT) -> Renewal | None:
        """Return which leases the polls of the object's pods renew."""
        return None

    @abstractmethod
    def plan(self, seen: Snapshot[WorkT]) -> Step[Any]:
        """Return the next status, and the actions to take once it is recorded."""

    def recorded(self, step: Step[Any]) -> None:
        """Remember what the next plan needs of a step that was recorded."""

    def told_others(self, seen: Snapshot[WorkT], step: Step[Any]) -> OtherRound | None:
        """Return what other rounds must know of this object; None if it does not queue with them."""
        return None

    async def close(self) -> None:
        """Give up what is under way."""


class RoundPlanner(Planner[PoCRound]):
    """Rounds: the gateway is asked what it has of the results; without one, the receiver's Secret is read."""

    resource = PoCRound
    queues = True

    def __init__(self, sources: Sources, ref: ObjectRef, log: ObjectLogger) -> None:
        super().__init__(sources, ref, log)
        gateway = sources.gateway
        self._gateway = GatewayObserver(gateway, ref, log, time.monotonic) if gateway is not None else None
        self._report: GatewayReport | None = None
        self._secret: CallbackSecretReader | None = None
        self._callback_auth: BasicAuth | str | None = None

    async def ask(self, work: PoCRound) -> None:
        """Without a gateway, read the Secret of the receiver, if that is due."""
        secret = work.spec.callback_secret_ref
        if self._gateway is None and secret is not None:
            self._secret = self._secret or self._reader(secret.name)
            self._callback_auth = await self._secret.read()

    async def compare(self, work: PoCRound, reports: Mapping[str, PodReport]) -> None:
        """Ask the gateway, if a question is due; at each turn while the round ends, which waits for the answer."""
        if self._gateway is not None:
            heard = {uid: report.status for uid, report in reports.items() if report.status is not None}
            self._report = await self._gateway.observe(heard, now=work.status.stop_time is not None)

    def renewal(self, work: PoCRound) -> Renewal | None:
        """Return the leases of the pods that are to compute on, once it is recorded when they end."""
        return renewal(work, self._sources.lease_seconds)

    def plan(self, seen: Snapshot[PoCRound]) -> Step[Any]:
        """Return the round's next step."""
        return rounds.plan(self._snapshot(seen))

    def recorded(self, step: Step[Any]) -> None:
        """Tell the gateway what was decided about rivals, and forget its losses, which the plan knew."""
        if self._gateway is not None and self._report is not None:
            self._gateway.planned(self._report)
        for action in step.actions:
            if isinstance(action, DecideRivals) and self._gateway is not None:
                self._gateway.decide(action.decisions)

    def told_others(self, seen: Snapshot[PoCRound], step: Step[Any]) -> OtherRound | None:
        """Return the round's place in the queue for pods, those that it has, and those that it wants."""
        snapshot = self._snapshot(seen)
        return as_other(seen.work, step.status, lambda: takeable_pods(snapshot), blocked=snapshot.blocked is not None)

    async def close(self) -> None:
        """Give up the question that is under way."""
        if self._gateway is not None:
            await self._gateway.cancel()

    def _reader(self, secret: str) -> CallbackSecretReader:
        return CallbackSecretReader(self._sources.store.basic_auth, self._ref.namespace, secret, warn=self._log.warning)

    def _snapshot(self, seen: Snapshot[PoCRound]) -> RoundSnapshot:
        return RoundSnapshot(
            work=seen.work,
            pods=seen.pods,
            reports=seen.reports,
            now=seen.now,
            others=seen.others,
            find_other_rounds=seen.find_other_rounds,
            missing_fleet=seen.missing_fleet,
            gateway=self._report,
            rate_limit=self._sources.rate_limit,
            lease_seconds=self._sources.lease_seconds,
            owner=self._sources.owner,
            callback_auth=self._callback_auth,
        )


class ValidationPlanner(Planner[PoCValidation]):
    """Validations: their proofs stand in the object, in a ConfigMap, or in the gateway."""

    resource = PoCValidation

    def __init__(self, sources: Sources, ref: ObjectRef, log: ObjectLogger) -> None:
        super().__init__(sources, ref, log)
        self._proofs: Sequence[Proof] | str = ()
        self._sampled: Sequence[Proof] | None = None
        self._entry: tuple[str, Sequence[Proof]] | None = None  # of the ConfigMap: its version, and the proofs
        self._entry_read_at = float("-inf")

    async def ask(self, work: PoCValidation) -> None:
        """Read the proofs, or find out why they cannot be had."""
        proofs, protocol = work.spec.proofs, work.spec.protocol
        if proofs.round is not None:
            found = await self._sample(proofs.round, protocol)
        elif proofs.config_map is not None:
            found = await self._entry_of(proofs.config_map, protocol)
        else:
            found = proofs.inline or ()
        self._proofs = found if isinstance(found, str) else in_order(found)

    def plan(self, seen: Snapshot[PoCValidation]) -> Step[Any]:
        """Return the validation's next step."""
        snapshot = validations.ValidationSnapshot(
            work=seen.work,
            pods=seen.pods,
            reports=seen.reports,
            now=seen.now,
            find_other_rounds=seen.find_other_rounds,
            missing_fleet=seen.missing_fleet,
            proofs=self._proofs,
        )
        return validations.plan(snapshot)

    async def _entry_of(self, source: ConfigMapKey, protocol: Protocol) -> Sequence[Proof] | str:
        """Return the proofs of a ConfigMap, which may be large: read now and then, and parsed once."""
        if self._entry is not None and time.monotonic() - self._entry_read_at < PROOFS_SECONDS:
            return self._entry[1]
        known, self._entry = self._entry, None
        name, key = source.name, source.key
        try:
            version, entry = await self._sources.store.config_map_entry(self._ref.namespace, name, key)
        except StoreForbidden as error:
            return f'ConfigMap "{name}" cannot be read ({error}): install the chart with rbac.readConfigMaps=true'
        except LookupError:
            return f'there is no ConfigMap "{name}" in namespace "{self._ref.namespace}": create it'
        if known is not None and known[0] == version:
            found: Sequence[Proof] | str = known[1]
        else:
            found = parse_proofs(f'key "{key}" of ConfigMap "{name}"', entry, protocol)
        if not isinstance(found, str):
            self._entry, self._entry_read_at = (version, found), time.monotonic()
        return found

    async def _sample(self, source: RoundSample, protocol: Protocol) -> Sequence[Proof] | str:
        """Return the results that the gateway picked; read once, as it may pick others while the round goes on."""
        if self._sampled is None:
            found = await self._read_sample(source, protocol)
            if isinstance(found, str):
                return found
            self._sampled = found
        return self._sampled

    async def _read_sample(self, source: RoundSample, protocol: Protocol) -> Sequence[Proof] | str:
        gateway, namespace = self._sources.gateway, self._ref.namespace
        if gateway is None:
            return "spec.proofs.round needs a gateway: start the operator with --gateway-url"
        where = f'the gateway\'s sample of round "{source.name}"'
        try:
            body = await gateway.sample(namespace, source.name, source.nonces, source.seed)
        except GatewayError as error:
            return f"{where} cannot be had: {error}"
        if body is None:
            return f'the gateway has no results of a round "{source.name}" in namespace "{namespace}"'
        return parse_proofs(where, body, protocol)


class CalibrationPlanner(Planner[PoCCalibration]):
    """Calibrations: what was measured is remembered, since it may be too long for the status."""

    resource = PoCCalibration

    def __init__(self, sources: Sources, ref: ObjectRef, log: ObjectLogger) -> None:
        super().__init__(sources, ref, log)
        self._measured: calibrations.Measured = {}

    def plan(self, seen: Snapshot[PoCCalibration]) -> Step[Any]:
        """Return the calibration's next step."""
        snapshot = calibrations.CalibrationSnapshot(
            work=seen.work,
            pods=seen.pods,
            reports=seen.reports,
            now=seen.now,
            find_other_rounds=seen.find_other_rounds,
            missing_fleet=seen.missing_fleet,
            measured=self._measured,
        )
        return calibrations.plan(snapshot)

    def recorded(self, step: Step[Any]) -> None:
        """Remember what was measured."""
        if isinstance(step, calibrations.CalibrationStep):
            self._measured = step.measured


PLANNERS: tuple[type[Planner[Any]], ...] = (RoundPlanner, ValidationPlanner, CalibrationPlanner)
