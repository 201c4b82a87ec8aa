# SPDX-License-Identifier: Apache-2.0
"""When a lease may be renewed, and when it is certain to have run out."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poc_operator.leases import LEAST_LEASE_SECONDS, Renewal, recorded_end
from vllm_poc.wire.messages import MAX_LEASE_SECONDS

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
#: By how much a poll may be late and the clocks of two operators differ, both together, as the decision page says.
APART = timedelta(seconds=60)
SECONDS = st.integers(LEAST_LEASE_SECONDS, MAX_LEASE_SECONDS)
TIMES = st.integers(0, 10**6).map(lambda seconds: NOW + timedelta(seconds=seconds))


def renewal(seconds: int, end: datetime) -> Renewal:
    return Renewal(round_id="r", uids={"a"}, seconds=seconds, end=end)


@given(recorded=st.none() | TIMES, now=TIMES, seconds=SECONDS)
def test_what_is_recorded_lets_polls_renew_until_the_next_plans(
    recorded: datetime | None, now: datetime, seconds: int
) -> None:
    end = recorded_end(recorded, now, seconds)
    assert recorded is None or end >= recorded
    lease = timedelta(seconds=seconds)
    for later in (timedelta(0), lease / 10):
        assert renewal(seconds, end).is_of("a", now + later)
    if recorded is None or recorded <= now:
        assert end <= now + 1.25 * lease + APART


@given(now=TIMES, seconds=SECONDS)
def test_it_is_recorded_seldom(now: datetime, seconds: int) -> None:
    end = recorded_end(None, now, seconds)
    assert recorded_end(end, now + timedelta(seconds=seconds / 10), seconds) == end


@given(end=TIMES, now=TIMES, seconds=SECONDS)
def test_no_poll_renews_beyond_what_is_recorded(end: datetime, now: datetime, seconds: int) -> None:
    if renewal(seconds, end).is_of("a", now):
        assert now + timedelta(seconds=seconds) + APART <= end


@given(recorded=st.none() | TIMES, now=TIMES, seconds=SECONDS, late=st.floats(0, 60), earlier=st.floats(0, 100))
def test_no_slot_moves_while_its_pod_may_compute(
    recorded: datetime | None, now: datetime, seconds: int, late: float, earlier: float
) -> None:
    """The last poll comes late, and the operator that waits for the lease to end has a clock that is ahead."""
    end = recorded_end(recorded, now, seconds)
    sent = end - timedelta(seconds=seconds + earlier)
    computes_until = sent + timedelta(seconds=late + seconds)
    moves_at = end - (APART - timedelta(seconds=late))  # by the clock of who sent the poll
    if renewal(seconds, end).is_of("a", sent):
        assert computes_until <= moves_at


@pytest.mark.parametrize(("uid", "renewed"), [("a", True), ("b", False)])
def test_only_pods_that_are_to_compute_on_are_renewed(uid: str, renewed: bool) -> None:
    assert renewal(60, recorded_end(None, NOW, 60)).is_of(uid, NOW) is renewed
