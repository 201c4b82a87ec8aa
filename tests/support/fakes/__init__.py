# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that fail at an exact moment, in ways that the real thing cannot be made to."""
