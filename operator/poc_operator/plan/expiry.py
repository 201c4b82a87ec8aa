# SPDX-License-Identifier: Apache-2.0
"""``spec.ttlSecondsAfterFinished``: a finished round is deleted when its time to live has passed."""

from poc_operator.plan.snapshot import DeleteRound, Snapshot, Step


def expire(snapshot: Snapshot, step: Step) -> Step:
    """Delete the round if it is finished and its time to live has passed."""
    ttl = snapshot.round.spec.ttl_seconds_after_finished
    finished = step.status.completion_time
    if ttl is None or finished is None or (snapshot.now - finished).total_seconds() < ttl:
        return step
    return step.extended(actions=[DeleteRound()])
