# SPDX-License-Identifier: Apache-2.0
"""kopf tries its requests without an end: what ends with its patience is the process, for all namespaces."""

from collections.abc import Sized
from itertools import islice

from poc_operator.handlers.process import Backoffs


def test_they_have_no_end_and_begin_anew_for_each_request() -> None:
    backoffs = Backoffs()
    assert not isinstance(backoffs, Sized), "kopf counts the tries of what has a length"
    first = list(islice(backoffs, 1000))
    assert len(first) == 1000
    assert first == list(islice(backoffs, 1000))
    assert first[:4] == sorted(first[:4])
    assert set(first[4:]) == {10}
