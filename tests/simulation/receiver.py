# SPDX-License-Identifier: Apache-2.0
"""A callback receiver that counts how often each nonce arrived, in which scheme, and can be away for a while."""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.support.fakes.callback_receiver import payload_nonces
from tests.support.servers.http_server import free_port

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 2**24


class CountingReceiver:
    """Arrivals by the round's block hash."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://{ADDRESS}:{self._port}"
        #: While true, posts are answered 503 and do not count.
        self.fails = False
        self.arrivals: dict[str, Counter[int]] = defaultdict(Counter)
        #: How many indices its results had, by the round's block hash; 0 for vectors.
        self.chain_lengths: dict[str, set[int]] = defaultdict(set)
        self._runner: web.AppRunner | None = None

    async def _generated(self, request: web.Request) -> web.Response:
        if self.fails:
            return web.Response(status=503)
        payload = await request.json()
        self.arrivals[payload["block_hash"]].update(payload_nonces(payload))
        lengths = {len(artifact.get("k_points_steps") or ()) for artifact in payload.get("artifacts", ())}
        self.chain_lengths[payload["block_hash"]] |= lengths
        return web.Response()

    async def open(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generated", self._generated)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, ADDRESS, self._port, reuse_address=True).start()

    async def close(self) -> None:
        """Stop to listen: connections are refused."""
        assert self._runner is not None
        await self._runner.cleanup()

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Listen until the block ends."""
        await self.open()
        try:
            yield
        finally:
            await self.close()
