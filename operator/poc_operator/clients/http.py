# SPDX-License-Identifier: Apache-2.0
"""Answers of bounded size: what pods and the gateway say must not fill the operator's memory."""

import aiohttp


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Return the body; None if it exceeds ``limit`` bytes."""
    body = await response.content.read(limit + 1)
    while len(body) <= limit and (more := await response.content.read(limit)):
        body += more
    return body if len(body) <= limit else None
