# SPDX-License-Identifier: Apache-2.0
"""Options of the operator's command line."""

from argparse import ArgumentTypeError

import pytest

from poc_operator.__main__ import lease_seconds


@pytest.mark.parametrize("text", ["60", "3600", "604800"])
def test_a_lease_may_last_from_a_minute_to_a_week(text: str) -> None:
    assert lease_seconds(text) == int(text)


@pytest.mark.parametrize("text", ["59", "0", "-60", "604801", "1.5", "an hour", ""])
def test_another_lease_is_refused_with_its_bounds(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f'"{text}" is no whole number from 60 to 604800'):
        lease_seconds(text)
