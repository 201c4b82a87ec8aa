# SPDX-License-Identifier: Apache-2.0
"""Whether the gateway's numbers can be true: what cannot is not counted, as with pods.

A gateway may have been told lies, run without credentials, or be none of ours. No number of it ends a round that
could not have got so far.
"""

from collections import Counter
from collections.abc import Mapping

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import CollectedRound, CollectedSlot
from vllm_poc.wire.partition import NonceSlot


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
    if round_.spec.artifact is not None and told.delivered_index > told.stored:
        return f"it is delivered up to index {told.delivered_index}, and {told.stored} are stored"
    if told.forwarded > told.stored:
        return f"{told.forwarded} are forwarded, and {told.stored} are stored"
    return None
