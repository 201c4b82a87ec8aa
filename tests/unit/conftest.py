# SPDX-License-Identifier: Apache-2.0
"""What all unit tests share."""

import os

from hypothesis import HealthCheck, settings

# A test that is slow on a busy machine is right all the same. Every run tries the same examples, so that no chance
# decides; `make histories` looks for new ones.
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="HISTORIES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")
