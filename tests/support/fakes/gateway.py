# SPDX-License-Identifier: Apache-2.0
"""A gateway in memory on the loopback interface, which can be told to misbehave.

It stores each nonce once, as the real one does, and asks for the same credentials.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from poc_operator.credentials import CredentialError, Verifier
from poc_operator.observed import CollectedRound, CollectedSlot
from tests.support.fakes.callback_receiver import payload_nonces

TOKEN = "gateway-token"  # noqa: S105 - of tests alone
CALLBACK_KEY = "callback-key"


class Gateway:
    """Results of one round by nonce; ``answer`` is the status of answers to the operator, ``delay`` their delay."""

    def __init__(self, stride: int) -> None:
        self.url = ""
        self.stride = stride
        self.stored: set[int] = set()
        self.duplicates = 0
        self.conflicts = 0
        self.uid = ""
        self.key = CALLBACK_KEY
        self.pods: set[tuple[str, str]] = set()  # that have delivered: name and uid
        self.answer = 200
        self.body: str | None = None
        self.delay = 0.0
        self.loses = False  # it takes results, and has not got them when it is asked
        self.questions: list[dict[str, str]] = []

    async def generated(self, request: web.Request) -> web.Response:
        """Store a payload."""
        self.uid = request.match_info["uid"]
        sent = aiohttp.BasicAuth.decode(request.headers.get("Authorization", ""))
        try:
            grant = Verifier([self.key]).verify(sent.password, time.time())
        except CredentialError:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="poc-gateway"'})
        nonces = payload_nonces(await request.json())
        assert {nonce % self.stride for nonce in nonces} <= {grant.slot}
        assert all(nonce < grant.slot + grant.reach(time.time()) * self.stride for nonce in nonces)
        assert grant.round == self.uid
        self.pods.add((grant.pod, grant.pod_uid))
        self.duplicates += len(self.stored.intersection(nonces))
        if not self.loses:
            self.stored.update(nonces)
        return web.json_response({})

    async def ask(self, request: web.Request) -> web.Response:
        """Tell the operator of the progress, or give it a sample."""
        self.questions.append({**request.match_info, **request.query})
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"reason": "Unauthorized", "detail": "no token"}, status=401)
        await asyncio.sleep(self.delay)
        if self.body is not None or self.answer != 200:
            return web.Response(text=self.body or "", status=self.answer)
        if request.match_info["what"] == "progress":
            return web.Response(text=self._progress(self.uid or request.query["uid"]).model_dump_json())
        if not self.uid:
            return web.json_response({"reason": "RoundUnknown", "detail": "no such round"}, status=404)
        proofs: list[dict[str, Any]] = [{"nonce": nonce, "vector": "AAAAAAAAAAA="} for nonce in sorted(self.stored)]
        return web.json_response(proofs[: int(request.query["nonces"])])

    def _progress(self, uid: str) -> CollectedRound:
        slots = [self._slot(offset) for offset in sorted({nonce % self.stride for nonce in self.stored})]
        return CollectedRound(
            uid=uid,
            stored=len(self.stored),
            duplicates=self.duplicates,
            conflicts=self.conflicts,
            forwarded=0,
            slots=slots,
        )

    def _slot(self, offset: int) -> CollectedSlot:
        nonces = [nonce for nonce in self.stored if nonce % self.stride == offset]
        whole = next(index for index in range(len(nonces) + 1) if offset + index * self.stride not in self.stored)
        return CollectedSlot(
            slot=offset,
            stored=len(nonces),
            last_nonce=max(nonces),
            delivered_index=whole,
            duplicates=0,
            conflicts=self.conflicts,
            forwarded=0,
        )


@asynccontextmanager
async def gateway(stride: int = 2) -> AsyncIterator[Gateway]:
    """Run a gateway for a round of ``stride`` slots on a free port."""
    found = Gateway(stride)
    app = web.Application(client_max_size=16 * 2**20)
    app.router.add_post("/callbacks/{namespace}/{name}/{uid}/generated", found.generated)
    app.router.add_get("/rounds/{namespace}/{name}/{what}", found.ask)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()
