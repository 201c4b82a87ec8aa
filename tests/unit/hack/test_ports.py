# SPDX-License-Identifier: Apache-2.0
"""Runs of tests beside each other do not take one another's ports."""

from itertools import combinations, islice

from tests.support.servers.http_server import own_ports

#: Runs that begin within a moment, and how many servers each of them starts.
RUNS, SERVERS = 6, 100


def test_runs_that_begin_within_a_moment_have_ports_of_their_own() -> None:
    for pid in range(1, 4_000, 17):
        ports = [set(islice(own_ports(pid + number), SERVERS)) for number in range(RUNS)]
        assert not any(one & other for one, other in combinations(ports, 2)), pid
