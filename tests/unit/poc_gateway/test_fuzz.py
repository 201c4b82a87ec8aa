# SPDX-License-Identifier: Apache-2.0
"""Whatever is sent to the gateway's routes is answered in time and as documented, and what is refused changes nothing.

FUZZ_EXAMPLES=10000 pytest --log-cli-level=INFO tests/unit/poc_gateway/test_fuzz.py
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings

from poc_gateway.node_api import create_pocround, dispatch
from poc_gateway.node_api.messages import NetworkGenerate
from poc_gateway.node_api.service import NodeApi
from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, inside_app, network_app
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from tests.support.builders.gateway_requests import NETWORK_TOKEN, Request, Target, requests
from tests.support.builders.gateway_seeds import check_seeds, read_round, rows, store_seeds, targets
from tests.support.builders.openapi_cases import cases
from tests.support.builders.secrets import ENVIRONMENT
from tests.support.checks.gateway_answers import Fuzzing, State
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, INIT, PARAMS, URL, validation

#: Requests of the three runs together: to the inside's app on both databases, and to the network's.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "400"))
SHARE = -(-EXAMPLES // 3)
#: So many requests reach every operation.
MANY = 1_000
#: After the tenth Hypothesis begins to vary what it had, which here repeats most requests.
BATCH = 10
#: Bodies are limited so that some exceed it.
SETTINGS = {
    **ENVIRONMENT,
    "POC_GATEWAY_NETWORK_TOKEN": NETWORK_TOKEN,
    "POC_GATEWAY_BODY_BYTES": "5200",
    "POC_GATEWAY_NETWORK_BODY_BYTES": "5200",
}
QUEUED: dict[str, Any] = BLOCK | {"params": PARAMS, "nonces": [7], "url": URL}
NETWORK_BODIES: dict[str, Sequence[Any]] = {
    "init/generate": [INIT, BLOCK | {"r_target": 1.4, "seq_len": 64}],
    "pow/generate": [
        QUEUED,
        validation(nonces=[1, 2], validation={"artifacts": validation()["validation"]["artifacts"][:1]}),
        BLOCK | {"params": PARAMS, "nonces": [1, 2, 3], "wait": True},
        BLOCK | {"r_target": 1.4, "nonces": [4, 5], "wait": True, "beside_round": True},
        validation(
            url=None, nonces=[1], validation={"artifacts": validation()["validation"]["artifacts"][:1]}, wait=True
        ),
    ],
    "inference/up": [{"model": "tiny"}],
    "inference/up/async": [{"model": "tiny"}],
}
#: What no request can do here: pods without GPUs, whose weights are the cluster's, and callbacks that nobody has sent.
NETWORK_REFUSING = {
    "DELETE /api/v1/models": "ModelNotFound",
    "GET /api/v1/models/space": "NotSupported",
    "GET /api/v1/gpu/driver": "NoDriver",
    "POST /api/v1/pow/callback-relay/{token}/{suffix}": "CallbackUnknown",
    "POST /api/v1/inference/pow/callback-relay/{token}/{suffix}": "CallbackUnknown",
}

pytestmark = pytest.mark.timeout(120 + EXAMPLES // 5)

_log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # A line for each request would drown the one that counts them.
    for name in ("alembic", "httpx", "poc_gateway", "vllm_poc"):
        caplog.set_level(logging.ERROR, name)


def _parts(database: Database, *ml_nodes: NodeApi) -> Components:
    values = Settings.from_environment(SETTINGS)
    known, outbox = Rounds(database, read_round), Outbox(database, values)
    return Components(settings=values, database=database, rounds=known, outbox=outbox, ml_nodes=ml_nodes)


def _fuzz(
    runner: asyncio.Runner,
    app: FastAPI,
    state: Callable[[], State],
    about: Sequence[Target],
    name: str,
    refusing: Mapping[str, str] = MappingProxyType({}),
) -> None:
    names, some = cases(app)
    fuzzing = Fuzzing(app, state, refusing)

    @settings(
        max_examples=BATCH,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(request=requests(some, about))
    def ask(request: Request) -> None:
        runner.run(fuzzing.ask(request))

    batches = itertools.count()
    while fuzzing.statuses.total() < SHARE:
        seed(f"{name} {next(batches)}")(ask)()
    runner.run(fuzzing.close())
    asked = fuzzing.statuses.total()
    _log.info("%d different requests to %s, answered %s", asked, name, dict(sorted(fuzzing.statuses.items())))
    assert asked >= SHARE
    if asked >= MANY:
        assert fuzzing.done == set(names)


def test_the_inside(database: Database) -> None:
    # Its outbox does not run, so that nothing changes but by requests.
    with asyncio.Runner() as runner:
        runner.run(store_seeds(database))
        before = rows(database)
        app = inside_app(_parts(database))
        # A delivery that is not granted is counted for its pod, and changes nothing else.
        still = [table for table in schema.metadata.sorted_tables if table is not schema.authors]
        _fuzz(runner, app, lambda: rows(database, still), targets(), f"the inside on {database.engine.dialect.name}")
        check_seeds(before, rows(database))


def test_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_pocround, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(dispatch, "REST_SECONDS", 0.05)
    monkeypatch.setattr("vllm_poc.server.routes.vllm_version", lambda: "0.32.0")  # which is not installed here
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        world = runner.run(stack.enter_async_context(running_world(tmp_path, pods=1, one=None, also=None, **SETTINGS)))
        try:
            _fuzz_network(runner, world)
        finally:
            runner.run(stack.aclose())


def _fuzz_network(runner: asyncio.Runner, world: World) -> None:
    async def prepare() -> str:
        await store_seeds(world.database)
        return (await world.service.jobs.submit(NetworkGenerate.model_validate(QUEUED))).request_id

    def state() -> State:
        # Jobs end on their own, and then write callbacks: of them only which there are. The clock goes on.
        own = (schema.jobs, schema.callbacks, schema.clock)
        still = [table for table in schema.metadata.sorted_tables if table not in own]
        jobs = [job.id for job in rows(world.database, [schema.jobs])["jobs"]]
        rounds = [(name, one.spec.finish) for name, one in world.cluster.rounds.items()]
        return {**rows(world.database, still), "jobs": jobs, "PoCRounds": rounds}

    target = Target({"request_id": runner.run(prepare())}, NETWORK_BODIES)
    before = rows(world.database)
    app = network_app(_parts(world.database, world.service))
    _fuzz(runner, app, state, [target], "the network", NETWORK_REFUSING)
    check_seeds(before, rows(world.database))
