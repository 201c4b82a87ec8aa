# SPDX-License-Identifier: Apache-2.0
"""What all unit tests share."""

from hypothesis import settings

# A test that is slow on a busy machine is right all the same.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
