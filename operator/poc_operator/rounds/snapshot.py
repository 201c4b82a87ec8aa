# SPDX-License-Identifier: Apache-2.0
"""What a round's plan sees beside what all plans see: the gateway, and the nonces of each slot.

A gateway may have been told lies, run without credentials, or be none of ours. What cannot be true is not counted, as
with pods: no number of it ends a round that could not have got so far.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound, RoundStatus
from poc_operator.basic_auth import BasicAuth
from poc_operator.credentials import RATE_LIMIT, plausible_nonces
from poc_operator.leases import LEASE_SECONDS
from poc_operator.observed import CollectedRound, CollectedSlot, GatewayReport
from poc_operator.planning.eligibility import Finding
from poc_operator.planning.snapshot import Snapshot, Step
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.messages import Protocol
from vllm_poc.wire.partition import NonceSlot

RoundStep = Step[RoundStatus]


@dataclass(frozen=True, kw_only=True)
class RoundSnapshot(Snapshot[PoCRound]):
    """What one plan of a round sees. ``gateway`` is None if pods deliver to the round's own callback address.

    ``rate_limit`` is how many nonces per second no pod exceeds, ``lease_seconds`` how long pods compute on if nobody
    asks them, ``owner`` the name under which this cluster's operator gives orders. ``callback_auth`` is what the Secret
    for that address has, or why it cannot be had; None if the round names no Secret.
    """

    gateway: GatewayReport | None = None
    callback_auth: BasicAuth | str | None = None
    rate_limit: int = RATE_LIMIT
    lease_seconds: int = LEASE_SECONDS
    owner: str | None = None

    @property
    def round(self) -> PoCRound:
        """The round."""
        return self.work

    @property
    def reach(self) -> int:
        """The first index of a slot that no pods can have computed by now, one after the other."""
        return plausible_nonces(self.rate_limit, self.seconds_since(self.round.metadata.creation_timestamp))

    def rate_of(self, slot: Assignment) -> float:
        """Return the nonces per second that the slot's pod computes; 0 if it does not say, or what cannot be true."""
        status = self.report_of(slot).status
        return status.rate_per_second if status is not None and status.rate_per_second <= self.rate_limit else 0.0

    @property
    def blocked(self) -> Finding | None:
        """Why no pod can be told to start, whichever it is; None if nothing is in the way."""
        if isinstance(self.callback_auth, str):
            return Reason.CALLBACK_SECRET_UNAVAILABLE, self.callback_auth
        # How many slots there are to be, only the fleet knows.
        if self.missing_fleet is not None and not self.round.status.slots:
            return Reason.FLEET_NOT_FOUND, self.missing_fleet
        return None

    @cached_property
    def _collected(self) -> Mapping[int, CollectedSlot]:
        collected = self.gateway.collected if self.gateway is not None else None
        slots = collected.slots if collected is not None else ()
        return {found.slot: found for found in slots if found.slot not in self.gateway_contradictions}

    @cached_property
    def gateway_contradictions(self) -> Mapping[int, str]:
        """Why the gateway's numbers of slots cannot be true, by the slots' first nonces."""
        collected = self.gateway.collected if self.gateway is not None else None
        if collected is None:
            return {}
        return contradictions(self.round, collected, self.reach)

    @property
    def gateway_answered(self) -> bool:
        """Whether the gateway has said what it has, be it nothing."""
        return self.gateway is not None and self.gateway.asked is not None

    @property
    def gateway_answers(self) -> bool:
        """Whether the gateway has said what it has, be it nothing, and answered the last question too."""
        return self.gateway_answered and self.gateway is not None and self.gateway.error is None

    def heard_of(self, slot: Assignment) -> StatusResponse | None:
        """Return what the slot's pod had told before the gateway was asked for what it now tells."""
        return self.gateway.heard.get(slot.uid or "") if self.gateway is not None else None

    def collected_of(self, slot: Assignment) -> CollectedSlot | None:
        """Return what the gateway has of the slot; None if it has not told of it, or what cannot be true."""
        return self._collected.get(self._offset(slot))

    def gateway_contradicts(self, slot: Assignment) -> bool:
        """Whether what the gateway told of the slot cannot be true."""
        return self._offset(slot) in self.gateway_contradictions

    def has_lost(self, slot: Assignment) -> bool:
        """Whether the gateway has fewer results of the slot than it had told."""
        fallen = self.gateway.fallen if self.gateway is not None else frozenset()
        return self._offset(slot) in fallen and not self.gateway_contradicts(slot)

    def _offset(self, slot: Assignment) -> int:
        return slot.node + slot.group * self.round.spec.nodes.count

    def disrupted(self, slot: Assignment) -> bool:
        """Whether the cluster's infrastructure ended the slot's pod."""
        return any(pod.disrupted for pod in [*self.pods, *self.others] if pod.uid == slot.uid)

    def deleted(self, slot: Assignment) -> bool:
        """Whether the slot's pod is being deleted, by whoever it may be."""
        return any(pod.terminating for pod in [*self.pods, *self.others] if pod.uid == slot.uid)

    def partition_of(self, slot: Assignment) -> NonceSlot:
        """Return the nonces of the slot."""
        return NonceSlot(
            node_id=slot.node,
            node_count=self.round.spec.nodes.count,
            group_id=slot.group,
            n_groups=self.round.status.groups,
        )

    def is_whole(self, slot: Assignment) -> bool:
        """Whether every nonce of the slot is computed and delivered: there is none left to start with."""
        return slot.delivered >= self.partition_of(slot).capacity


def contradictions(round_: PoCRound, collected: CollectedRound, reach: int) -> Mapping[int, str]:
    """Return what is wrong with the gateway's numbers, by the first nonce of each slot that has any.

    ``reach`` is the first index of a slot that its pods cannot have computed yet.
    """
    told = Counter(slot.slot for slot in collected.slots)
    found = {slot.slot: _contradiction(round_, slot, reach) for slot in collected.slots}
    found |= {slot: f"it is listed {count} times" for slot, count in told.items() if count > 1}
    return {slot: why for slot, why in found.items() if why is not None}


def _contradiction(round_: PoCRound, told: CollectedSlot, reach: int) -> str | None:
    nodes, groups = round_.spec.nodes, round_.status.groups
    group, node = divmod(told.slot, nodes.count)
    if node not in nodes.ids or group >= groups:
        return "it is no slot of the round"
    end = 0
    if told.last_nonce >= 0:
        try:
            slot = NonceSlot(node_id=node, node_count=nodes.count, group_id=group, n_groups=groups)
            end = slot.index(told.last_nonce) + 1
        except ValueError as error:
            return str(error)
    if end > reach:
        return f"nonce {told.last_nonce} is number {end} of the slot, and no pod can have computed more than {reach}"
    return _disorder(round_, told, end)


def _disorder(round_: PoCRound, told: CollectedSlot, end: int) -> str | None:
    if max(told.stored, told.delivered_index) > end:
        return f"{told.stored} are stored and delivered up to index {told.delivered_index}, of {end} that there can be"
    if round_.spec.protocol is not Protocol.DISTANCE and told.delivered_index > told.stored:
        return f"it is delivered up to index {told.delivered_index}, and {told.stored} are stored"
    if told.forwarded > told.stored:
        return f"{told.forwarded} are forwarded, and {told.stored} are stored"
    return None
