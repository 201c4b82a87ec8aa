# SPDX-License-Identifier: Apache-2.0
"""Which tests one process takes, where several run: by a scope that is neither the file nor the test."""

from collections.abc import Callable
from typing import Any


def scheduling(config: Any, log: Any, scope_of: Callable[[str], str]) -> Any:  # noqa: ANN401 - xdist ships no types
    """Return xdist's scheduler that gives all tests of a scope to one process; ``scope_of`` takes a node id."""
    from xdist.scheduler.loadscope import LoadScopeScheduling  # noqa: PLC0415 - not everywhere

    found = LoadScopeScheduling(config, log)
    found._split_scope = scope_of  # as the schedulers of xdist override it
    return found
