# SPDX-License-Identifier: Apache-2.0
"""Addresses as they are shown. A callback address may carry a password, which is for its receiver alone."""

from yarl import URL


def shown(url: str) -> str:
    """Return the address without the user's name and password."""
    return str(URL(url).with_user(None))
