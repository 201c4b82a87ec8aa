# SPDX-License-Identifier: Apache-2.0
"""Whose work a reference pod computes: it names neither round nor scheme.

Two rounds of one block that differ in the scheme alone look alike in its status. A round that took the other one's work
for its own would count results of another scheme, or stop the other's pods. So what counts is what was recorded before
anything was ordered: each round records a slot for a pod while the pod computes nothing, and orders it afterwards.

| this round has recorded | another round of the block holds the pod | the work is      |
|-------------------------|------------------------------------------|------------------|
| this slot, confirmed    | no, or one that goes after this one      | this round's     |
| this slot, confirmed    | one that goes before                     | the other's      |
| this slot, unconfirmed  | no                                       | this round's     |
| the same, and displaces | no                                       | another's        |
| this slot, unconfirmed  | yes                                      | the other's      |
| no such slot            | no                                       | nobody's: a stray|
| no such slot            | yes                                      | the other's      |

A round that may replace work gets a slot on a pod while that computes. The slot displaces the work until the pod was
seen idle: nothing was ordered before, so what the pod computes is not the round's, even if its round has given it up
and the stop was lost.

A stray is stopped, as any pod that computes a slot which it does not have, and its pod gets no slot before: nothing
says which scheme it computes. Where both rounds wait for a confirmation the pod is stopped and told anew. A round on
which the operator fails holds its pods as before, except against one that has confirmed its slot.
"""

from collections.abc import Sequence
from dataclasses import replace

from poc_operator.apis.v1alpha1.round import Assignment
from poc_operator.observed import PodReport
from poc_operator.planning.queue import place_of
from poc_operator.planning.snapshot import OtherRound
from poc_operator.rounds.snapshot import RoundSnapshot
from vllm_poc.wire.answers import PowState, StatusResponse
from vllm_poc.wire.messages import Protocol, Scheme

_UNREAD = "computes work of this block, and the other rounds of the namespace have yet to be read"


def attributed(snapshot: RoundSnapshot) -> RoundSnapshot:
    """Return what the plan sees, with work that may be of another round taken for the other's."""
    doubtful = {uid: report for uid, report in snapshot.reports.items() if _is_like_this(snapshot, report)}
    if not doubtful:
        return snapshot
    slots = {slot.uid: slot for slot in snapshot.round.status.assignments if slot.state.active}
    judged = {uid: _judged(snapshot, uid, report, slots.get(uid)) for uid, report in doubtful.items()}
    return replace(snapshot, reports={**snapshot.reports, **judged})


def is_stray(report: PodReport) -> bool:
    """Whether the pod computes what looks like this round's, and cannot say whether it is."""
    return not report.resumes and report.status is not None and report.status.state is PowState.GENERATING


def _is_like_this(snapshot: RoundSnapshot, report: PodReport) -> bool:
    return is_stray(report) and report.status is not None and report.status.round_id == snapshot.round.id


def _judged(snapshot: RoundSnapshot, uid: str, report: PodReport, slot: Assignment | None) -> PodReport:
    status = report.status
    if status is None:
        return report
    recorded = slot if slot is not None and _is_slot(slot, status) else None
    confirmed = recorded is not None and recorded.session == status.session_id
    if not _offers_scheme(snapshot, report):
        return _of_another(report, status)
    if snapshot.known_rounds is None:
        return report if confirmed else replace(report, status=None, error=_UNREAD)
    holders = _holders(snapshot.known_rounds, uid, status)
    if confirmed:
        holders = [other for other in holders if other.current and other.place < place_of(snapshot.round)]
    displaced = recorded is not None and recorded.displaces
    return _of_another(report, status) if holders or displaced else report


def _is_slot(slot: Assignment, status: StatusResponse) -> bool:
    config = status.config
    return config is not None and (config.node_id, config.group_id) == (slot.node, slot.group)


def _offers_scheme(snapshot: RoundSnapshot, report: PodReport) -> bool:
    """Whether the pod may compute the round's scheme; one that did not tell may."""
    decodes = snapshot.round.spec.protocol is Protocol.DECODE
    return not decodes or report.schemes is None or Scheme.DECODE in report.schemes


def _holders(others: Sequence[OtherRound], uid: str, status: StatusResponse) -> Sequence[OtherRound]:
    config = status.config
    block = (config.block_hash, config.block_height, config.public_key) if config is not None else None
    return [other for other in others if other.block == block and uid in other.held]


def _of_another(report: PodReport, status: StatusResponse) -> PodReport:
    return replace(report, status=status.model_copy(update={"round_id": None}))
