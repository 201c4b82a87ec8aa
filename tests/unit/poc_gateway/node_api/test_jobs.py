# SPDX-License-Identifier: Apache-2.0
"""Named nonces: split over pods, given to others when pods fail, taken up after a restart."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from alembic import command
from alembic.config import Config
from prometheus_client import REGISTRY
from sqlalchemy import select

from poc_gateway.node_api import job_store, jobs
from poc_gateway.node_api.messages import FIRST_PORT
from poc_gateway.node_api.service import NodeApi
from poc_gateway.outbox import ledger
from poc_gateway.server.gauges import JobGauges
from poc_gateway.store import migrations, schema
from poc_gateway.store.database import Database
from poc_gateway.store.engine import create_engine
from poc_operator.clients.errors import PodRefused
from poc_operator.clients.pods.client import PodClient
from tests.support.builders.forwarding import until
from tests.support.fakes.engine import distance, vector
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import ARTIFACT, SLOT
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import BLOCK, NONCES, PARAMS, URL, error_of, validation
from tests.unit.poc_gateway.node_api.test_replay import finished
from vllm_poc.wire.generate import GenerateRequest

PATH = "inference/pow/generate"
ARTIFACTS: dict[str, Any] = BLOCK | {"params": PARAMS}


async def test_artifacts_come_in_the_order_of_the_nonces(world: World) -> None:
    nonces = [9, 3, 300, *range(1000, 1100)]
    body = (await world.post(PATH, ARTIFACTS | {"nonces": nonces, "wait": True})).json()
    assert body["artifacts"] == [{"nonce": nonce, "vector_b64": vector(nonce, 12)} for nonce in nonces]
    assert body["encoding"] == {"dtype": "f16", "k_dim": 12, "endian": "le"}
    assert all(pod.engine.computed for pod in world.pods.values())


async def test_distances_are_counted(world: World) -> None:
    nonces = list(range(50))
    body = (await world.post("pow/generate", BLOCK | {"r_target": 1.405, "nonces": nonces, "wait": True})).json()
    valid = [nonce for nonce in nonces if distance(nonce) < 1.405]
    assert (body["nonces"], body["valid_nonces"], body["total_valid"]) == (nonces, valid, len(valid))
    assert 0 < len(valid) < 50


async def test_on_a_full_disk_a_result_waits_for_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_RETRY_SECONDS", 0.05)
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.5
    queued = (await world.post(PATH, ARTIFACTS | {"nonces": [1, 2]})).json()
    monkeypatch.setattr(world.database.room, "full", True)
    monkeypatch.setattr(world.database.room, "admits", lambda: False)
    await asyncio.sleep(2.0)
    assert (await world.get(f"{PATH}/{queued['request_id']}")).json()["status"] == "running"
    monkeypatch.setattr(world.database.room, "admits", lambda: True)
    assert (await finished(world, queued["request_id"]))["status"] == "completed"


async def test_results_are_called_back_in_parts(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=1, POC_GATEWAY_PAYLOAD_ARTIFACTS="60") as world:
        queued = (await world.post(PATH, ARTIFACTS | {"nonces": list(range(100)), "url": URL})).json()
        await finished(world, queued["request_id"])
        rows = world.rows(select(schema.callbacks))
    assert [row["url"] for row in rows] == [f"{URL}/generated"] * 2
    assert [row["body"].count("vector_b64") for row in rows] == [60, 40]
    assert all(queued["request_id"] in row["body"] for row in rows)


async def test_a_chunk_of_a_pod_that_fails_goes_to_another(world: World) -> None:
    sick, well = world.pods.values()
    sick.engine.worker_error = "CUDA error"
    world.announce("127.0.0.3")  # where nobody listens
    body = (await world.post(PATH, validation(wait=True))).json()
    assert (body["n_total"], body["n_mismatch"]) == (200, 0)
    assert sorted(well.engine.computed) == NONCES


async def _looks(world: World, count: int) -> None:
    """Wait until the pods were looked at so often."""
    seen = set[float]()
    async with asyncio.timeout(30):
        while len(seen) <= count:
            seen.add(world.service.jobs._dispatcher._polled)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("pause", ["/pause", "/sleep"])
async def test_a_paused_pod_is_not_asked(world: World, monkeypatch: pytest.MonkeyPatch, pause: str) -> None:
    asked, generate = set[str](), PodClient.generate

    async def recorded(client: PodClient, base: str, request: GenerateRequest) -> Any:  # noqa: ANN401
        asked.add(base)
        return await generate(client, base, request)

    monkeypatch.setattr(PodClient, "generate", recorded)
    paused, other = world.pods.values()
    assert (await paused.http.post(pause)).status_code == 200
    body = (await world.post(PATH, validation(wait=True))).json()
    assert (body["n_total"], body["n_mismatch"]) == (200, 0)
    assert sorted(other.engine.computed) == NONCES
    assert [base for base in asked if "127.0.0.2" not in base] == []


async def test_work_waits_while_all_pods_are_paused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poc_gateway.node_api.dispatch.FAILURES", 1)
    for pod in world.pods.values():
        assert (await pod.http.post("/pause")).status_code == 200
    queued = (await world.post(PATH, validation())).json()
    await _looks(world, 3)
    assert (await world.get(f"{PATH}/{queued['request_id']}")).json()["status"] == "queued"
    for pod in world.pods.values():
        assert (await pod.http.post("/resume")).status_code == 200
    assert (await finished(world, queued["request_id"]))["status"] == "completed"


@pytest.mark.parametrize("reason", ["Busy", "Paused", "QueueFull", "ServerEnds"])
async def test_a_pod_that_declines_gets_nothing_while_there_is_another(
    world: World, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr("poc_gateway.node_api.dispatch.FAILURES", 1)
    declined, generate = 0, PodClient.generate

    async def declining(client: PodClient, base: str, request: GenerateRequest) -> Any:  # noqa: ANN401
        nonlocal declined
        if "127.0.0.1" in base and declining_too:
            declined += 1
            raise PodRefused(reason, "the engine is busy: ask again later")
        return await generate(client, base, request)

    declining_too = True
    monkeypatch.setattr(PodClient, "generate", declining)
    for _ in range(5):
        assert (await world.post(PATH, validation(wait=True))).json()["n_total"] == 200
    assert declined == 1
    assert world.pods["127.0.0.1"].engine.computed == []
    world.cluster.pods = world.cluster.pods[:1]  # and that is the one
    world.service.jobs._dispatcher._polled = float("-inf")
    queued = (await world.post(PATH, validation())).json()
    await _looks(world, 3)
    assert declined > 1
    declining_too = False
    assert (await finished(world, queued["request_id"]))["status"] == "completed", "which is no failure of the work"


async def test_pods_that_all_fail_end_the_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poc_gateway.node_api.dispatch.REST_SECONDS", 0.0)
    monkeypatch.setattr("poc_gateway.node_api.dispatch.FAILURES", 4)
    for pod in world.pods.values():
        pod.engine.worker_error = "CUDA error"
    error = error_of(await world.post(PATH, validation(wait=True)), 503, "PodsFailed")
    assert "CUDA error" in error.detail
    queued = (await world.post(PATH, validation())).json()
    body = await finished(world, queued["request_id"])
    assert body["status"] == "failed"
    assert "CUDA error" in body["error"]
    assert world.rows(select(schema.callbacks)) == []


async def test_work_waits_for_a_pod(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=0) as world:
        queued = (await world.post(PATH, validation())).json()
        assert (await world.get(f"{PATH}/{queued['request_id']}")).json()["status"] == "queued"
        await world.add_pod("127.0.0.1")
        assert (await finished(world, queued["request_id"]))["status"] == "completed"


async def test_requests_of_an_older_gateway_are_computed(tmp_path: Path) -> None:
    """Their ids name no ML node. The first of the list takes them up, and tells of them by the same ids."""
    ids = [f"{FIRST_PORT}:{uuid4().hex}" for _ in range(3)]
    request = GenerateRequest.model_validate(validation()).model_dump_json(exclude_none=True)
    rows = [(ids[0], request, "queued", None, None), (ids[1], "{}", "completed", '{"a": 1}', ledger.now())]
    rows.append((ids[2], '{"nonces": 7}', "queued", None, None))
    fill_older(tmp_path, rows)
    async with running_world(tmp_path, pods=1, also={"other": {}}) as world:
        done = await finished(world, ids[0], base="/nodes/one")
        assert (done["status"], done["request_id"], done["fraud_detected"]) == ("completed", ids[0], False)
        assert len(world.rows(select(schema.callbacks))) == 1
        assert (await world.http.get(f"/nodes/one/api/v1/{PATH}/{ids[1]}")).json() == {"a": 1}
        failed = (await world.http.get(f"/nodes/one/api/v1/{PATH}/{ids[2]}")).json()
        assert (failed["status"], "send it again" in failed["error"]) == ("failed", True)
        error_of(await world.http.get(f"/nodes/other/api/v1/{PATH}/{ids[0]}"), 404, "JobNotFound")


def fill_older(folder: Path, rows: list[tuple[Any, ...]]) -> None:
    """Make the database of a gateway that knew one ML node, with these jobs."""
    config, engine = Config(), create_engine(f"sqlite:///{folder}/gateway.db")
    config.set_main_option("script_location", migrations.__path__[0])
    columns = "id, request, state, result, finished_at, created_at"
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        for row in rows:
            connection.exec_driver_sql(f"INSERT INTO jobs ({columns}) VALUES (?, ?, ?, ?, ?, {ledger.now()})", row)  # noqa: S608
    engine.dispose()


async def test_pods_compute_beside_a_round(world: World) -> None:
    for place, pod in enumerate(world.pods.values()):
        round_ = ARTIFACT | SLOT | {"group_id": place, "round_id": "r"}
        assert (await pod.start(round_)).status_code == 200
    body = (await world.post(PATH, validation(wait=True))).json()
    assert body["n_total"] == 200
    assert [(await pod.status()).status for pod in world.pods.values()] == ["GENERATING"] * 2


async def test_a_restart_takes_jobs_up(world: World) -> None:
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.3
    ids = [(await world.post(PATH, validation(changed))).json()["request_id"] for changed in (0, 40)]

    async def runs() -> bool:
        return bool((await world.get(f"{PATH}/{ids[0]}")).json()["status"] == "running")

    await until(runs)
    await world.close()
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.001
    await world.open()
    assert [(await finished(world, job))["fraud_detected"] for job in ids] == [False, True]
    assert len(world.rows(select(schema.callbacks))) == 2


async def test_a_client_that_goes_away_frees_the_pods(world: World) -> None:
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.5
    port = free_port()
    async with serve(world.app, "127.0.0.1", port), httpx.AsyncClient(timeout=httpx.Timeout(20, read=0.4)) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.post(f"http://127.0.0.1:{port}/api/v1/{PATH}", json=validation(wait=True))
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.001
    body = (await world.post(PATH, ARTIFACTS | {"nonces": [7], "wait": True})).json()
    assert body["artifacts"] == [{"nonce": 7, "vector_b64": vector(7, 12)}]
    assert sum(len(pod.engine.computed) for pod in world.pods.values()) < len(NONCES)


async def test_a_nonce_without_a_finite_result_leaves_the_sample(world: World) -> None:
    for pod in world.pods.values():
        pod.engine.sick[NONCES[3]] = 9
    body = (await world.post(PATH, validation(5, wait=True))).json()
    assert (body["n_total"], body["mismatch_nonces"]) == (199, [nonce for nonce in NONCES[:5] if nonce != NONCES[3]])
    assert body["not_computed"] == [NONCES[3]]
    for pod in world.pods.values():
        pod.engine.sick.update(dict.fromkeys(NONCES, 9))
    error_of(await world.post(PATH, validation(wait=True)), 503, "NothingComputed")


async def test_too_many_nonces_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_QUEUED_NONCES", 300)
    world.cluster.pods.clear()
    assert (await world.post(PATH, validation())).json()["queued_count"] == 200
    answer = await world.post(PATH, validation())
    assert error_of(answer, 429, "QueueFull").detail.startswith("Queue full: 400 nonces")


async def test_results_expire(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (await world.post(PATH, validation())).json()["request_id"]
    await finished(world, first)
    monkeypatch.setattr(job_store, "KEEP_SECONDS", 0)
    await asyncio.sleep(0.01)
    error_of(await world.get(f"{PATH}/{first}"), 404, "JobNotFound")
    # A long id must not push what it means out of the sentence.
    assert "results are kept" in error_of(await world.get(f"{PATH}/5001:{'x' * 600}"), 404, "JobNotFound").detail
    await world.post(PATH, validation())
    # Its callback has yet to go out.
    assert first in [row["id"] for row in world.rows(select(schema.jobs))]
    await world.database.write(
        lambda connection: connection.execute(schema.callbacks.update().values(state="delivered"))
    )
    await world.post(PATH, validation())
    assert first not in [row["id"] for row in world.rows(select(schema.jobs))]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"nonces": [*NONCES, 2]}, 400, "validation.artifacts: must have one artifact for each of nonces"),
        ({"nonces": [1, 1]}, 422, "nonces must be unique"),
        ({"nonces": [-1]}, 422, "nonces.0"),
        (
            {"params": PARAMS | {"decode": True, "max_tokens": 256}},
            422,
            "params.decode: asks for the decode scheme, which none of the ready pods offers",
        ),
        ({"params": {"model": "tiny", "seq_len": 5000}}, 422, "params.seq_len: 5000 exceeds"),
        ({"params": {"model": "huge", "seq_len": 64}}, 409, "params.model: huge"),
    ],
)
async def test_what_is_wrong_is_named(world: World, change: dict[str, Any], status: int, message: str) -> None:
    answer = await world.post(PATH, validation(wait=True) | change)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]


@pytest.mark.parametrize("odd", ["\0", "\ud800", "\n"])
async def test_whatever_a_pod_says_a_job_ends(database: Database, odd: str) -> None:
    await database.write(lambda connection: job_store.insert_job(connection, "job", "{}"))
    ended = job_store.JobEnd("job", error=f"10 pods failed, the last with: CUDA{odd} error")
    await database.write(lambda connection: job_store.finish_job(connection, ended))
    row = await database.read(lambda connection: job_store.find_job(connection, "job"))
    assert row == job_store.JobRow("failed", None, "10 pods failed, the last with: CUDA error")


def ended(kind: str, result: str) -> float:
    """How many jobs of this process have ended so."""
    labels = {"kind": kind, "result": result}
    return REGISTRY.get_sample_value("poc_gateway_jobs_ended_total", labels) or 0.0


def waiting(world: World) -> dict[tuple[str, str], float]:
    """The gauge of jobs that have not ended, by kind and state."""
    (family,) = JobGauges(list(world.services.values())).collect()
    return {(one.labels["kind"], one.labels["state"]): one.value for one in family.samples if one.value}


async def test_jobs_are_counted_while_they_wait_and_when_they_end(world: World) -> None:
    kinds = [("validate", "honest"), ("validate", "fraud"), ("generate", "completed"), ("generate", "dropped")]
    before = {kind: ended(*kind) for kind in kinds}
    await world.post(PATH, validation(wait=True))
    await world.post(PATH, validation(changed=200, wait=True))
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.5
    queued = (await world.post(PATH, ARTIFACTS | {"nonces": [1, 2]})).json()
    assert waiting(world).keys() <= {("generate", "queued"), ("generate", "running")}
    assert sum(waiting(world).values()) == 1
    await finished(world, queued["request_id"])
    assert waiting(world) == {}
    posting = asyncio.create_task(world.post(PATH, ARTIFACTS | {"nonces": list(range(200)), "wait": True}))
    await until(lambda: bool(waiting(world)))
    posting.cancel()
    async with asyncio.timeout(20):
        while waiting(world):  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.05)
    assert {kind: ended(*kind) - before[kind] for kind in kinds} == dict.fromkeys(kinds, 1)


async def test_a_job_that_fails_is_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poc_gateway.node_api.dispatch.REST_SECONDS", 0.0)
    monkeypatch.setattr("poc_gateway.node_api.dispatch.FAILURES", 2)
    for pod in world.pods.values():
        pod.engine.worker_error = "CUDA error"
    before = ended("validate", "failed")
    await world.post(PATH, validation(wait=True))
    queued = (await world.post(PATH, validation())).json()
    await finished(world, queued["request_id"])
    assert ended("validate", "failed") == before + 2


async def test_what_one_process_queues_the_owner_computes_and_all_tell_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_LOOK_SECONDS", 0.1)
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 2.0
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(PodClient())
        one, other = (shared_jobs(world, client) for _ in range(2))
        for each in (one, other):
            await each.start()
            stack.push_async_callback(each.close)
        request = GenerateRequest.model_validate(ARTIFACTS | {"nonces": [1, 2], "url": URL})
        queued = await one.submit(request)
        assert (queued.status, queued.queued_count) == ("queued", 2)
        assert (await other.submit(request)).queued_count == 4
        assert sum(one.counts().values()) == sum(other.counts().values()) == 0, "nobody computes them yet"
        first = asyncio.create_task(other.run_queued())
        await until(lambda: state(one, queued.request_id, "running"))
        first.cancel()
        await asyncio.wait([first])
        assert sum(other.counts().values()) == 0
        for pod in world.pods.values():
            pod.engine.seconds_per_batch = 0.001
        second = asyncio.create_task(one.run_queued())
        await until(lambda: state(other, queued.request_id, "completed"), seconds=30)
        second.cancel()
        await asyncio.wait([second])
    assert len(world.rows(select(schema.callbacks).where(schema.callbacks.c.job_id == queued.request_id))) == 1


async def state(of: jobs.Jobs, job_id: str, word: str) -> bool:
    return bool(json.loads(await of.find(job_id))["status"] == word)


async def test_of_two_ends_of_a_job_the_first_counts(database: Database) -> None:
    await database.write(lambda one: job_store.insert_job(one, "job", "{}"))
    for result in ("first", "second"):
        end = job_store.JobEnd("job", result=result, callbacks=[(URL, "{}")])
        await database.write(lambda one, end=end: job_store.finish_job(one, end))  # type: ignore[misc]
    assert await database.read(lambda one: job_store.find_job(one, "job")) == job_store.JobRow(
        "completed", "first", None
    )
    found = select(schema.callbacks.c.id)
    assert len(await database.read(lambda one: one.scalars(found).all())) == 1


async def test_what_all_processes_have_queued_has_one_limit(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "MAX_QUEUED_NONCES", 5)

    async def queue(job_id: str, nonces: int, prefix: str) -> int:
        return await database.write(
            lambda one: job_store.queue_job(one, f"{prefix}{job_id}", "{}", nonces=nonces, prefix=prefix)
        )

    a, b = job_store.prefix_of("a_b"), job_store.prefix_of("axb")
    assert [await queue("1", 3, a), await queue("2", 3, a), await queue("3", 2, a), await queue("4", 5, b)] == [
        3,
        6,
        5,
        5,
    ]
    assert len(await database.read(job_store.unfinished_ids)) == 3


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_what_is_no_id_of_a_request_is_told_from_one_that_is_gone(podless: World, method: str) -> None:
    for base in (PATH, "pow/generate"):
        answer = await podless.http.request(method, f"/api/v1/{base}/abc")
        assert error_of(answer, 400, "InvalidRequest").detail.startswith("request_id: must be 5001:ID")
        error_of(await podless.http.request(method, f"/api/v1/{base}/5001:abc"), 404, "JobNotFound")


def age(world: World, seconds: float) -> None:
    """Let all jobs be so much older."""
    created_at = schema.jobs.c.created_at
    with world.database.engine.begin() as connection:
        connection.execute(schema.jobs.update().values(created_at=created_at - int(seconds * 1_000)))


@pytest.mark.parametrize("delivery_seconds", [3_600, 0])
async def test_what_no_pod_computes_expires_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivery_seconds: int
) -> None:
    monkeypatch.setattr(jobs, "EXPIRY_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(jobs, "MAX_QUEUED_NONCES", 400)
    async with running_world(tmp_path, pods=0, POC_GATEWAY_DELIVERY_SECONDS=str(delivery_seconds)) as world:
        ids = [(await world.post(PATH, validation())).json()["request_id"] for _ in range(2)]
        error_of(await world.post(PATH, validation()), 429, "QueueFull")
        age(world, 3_500)
        await asyncio.sleep(0.3)
        assert await states(world, ids) == ["queued", "queued"]
        age(world, 200)
        await asyncio.sleep(0.5)
        if not delivery_seconds:
            assert await states(world, ids) == ["queued", "queued"], "0 is for ever"
            return
        assert await states(world, ids) == ["failed", "failed"]
        assert "POC_GATEWAY_DELIVERY_SECONDS" in (await world.get(f"{PATH}/{ids[0]}")).json()["error"]
        assert waiting(world) == {}
        new = (await world.post(PATH, validation())).json()["request_id"]
        await world.add_pod("127.0.0.1")
        assert (await finished(world, new))["status"] == "completed"


async def states(world: World, ids: list[str]) -> list[str]:
    return [(await world.get(f"{PATH}/{job_id}")).json()["status"] for job_id in ids]


async def test_nothing_expires_by_a_clock_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "EXPIRY_LOOK_SECONDS", 0.05)
    async with running_world(tmp_path, pods=0, POC_GATEWAY_DELIVERY_SECONDS="60") as world:
        await until(lambda: bool(world.rows(select(schema.clock))))  # which it writes at its first look
        await world.database.write(lambda one: one.execute(schema.clock.update().values(steady=0)) and None)
        await world.close()
        await world.open()
        queued = (await world.post(PATH, validation())).json()["request_id"]
        age(world, 3_600)
        await asyncio.sleep(0.5)
        assert await states(world, [queued]) == ["queued"]


async def test_queued_requests_are_listed_and_given_up(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=0, also={"other": {}}) as world:
        base = f"/nodes/one/api/v1/{PATH}"
        ids = [(await world.http.post(base, json=validation())).json()["request_id"] for _ in range(3)]
        listed = (await world.http.get(base)).json()
        assert listed["total"] == 3
        assert [(one["request_id"], one["status"], one["nonces"]) for one in listed["requests"]] == [
            (job_id, "queued", 200) for job_id in ids
        ]
        assert (await world.http.get(f"/nodes/other/api/v1/{PATH}")).json() == {"total": 0, "requests": []}
        error_of(await world.http.delete(f"/nodes/other/api/v1/{PATH}/{ids[0]}"), 404, "JobNotFound")
        for _ in range(2):  # every order is safe to repeat
            gone = (await world.http.delete(f"{base}/{ids[0]}")).json()
            assert (gone["status"], "DELETE" in gone["error"]) == ("cancelled", True)
        await until(lambda: waiting(world) == {("validate", "queued"): 2})
        await world.close()
        await world.open()
        assert [one["request_id"] for one in (await world.http.get(base)).json()["requests"]] == ids[1:]
        await world.add_pod("127.0.0.1")
        done = await finished(world, ids[1], base="/nodes/one")
        assert done["status"] == "completed"
        assert (await world.http.delete(f"{base}/{ids[1]}")).json() == done, "what has ended keeps its result"


async def test_the_latest_block_comes_first(world: World) -> None:
    """After an outage what has waited for long holds up nothing new; of one block the first comes first."""
    pods = list(world.cluster.pods)
    world.cluster.pods.clear()
    ids = dict[str, int]()
    for place, height in enumerate([5, 9, 7, 9]):
        ids[(await world.post(PATH, validation(block_height=height))).json()["request_id"]] = place
    world.cluster.pods[:] = pods[:1]
    for job_id in ids:
        await finished(world, job_id)
    ended = world.rows(select(schema.jobs.c.id).order_by(schema.jobs.c.finished_at))
    assert [ids[row["id"]] for row in ended] == [1, 3, 2, 0]


async def test_what_was_given_up_elsewhere_the_owner_drops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_LOOK_SECONDS", 0.1)
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 2.0
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(PodClient())
        one, other = (shared_jobs(world, client) for _ in range(2))
        for each in (one, other):
            await each.start()
            stack.push_async_callback(each.close)
        request = GenerateRequest.model_validate(ARTIFACTS | {"nonces": list(range(100))})
        queued = await one.submit(request)
        owner = asyncio.create_task(other.run_queued())
        await until(lambda: state(one, queued.request_id, "running"))
        assert json.loads(await one.give_up(queued.request_id))["status"] == "cancelled"
        await until(lambda: not other.counts())
        owner.cancel()
        await asyncio.wait([owner])
    (row,) = world.rows(select(schema.jobs.c.state))
    assert row["state"] == "cancelled"


def shared_jobs(world: World, client: PodClient) -> jobs.Jobs:
    """What one of several processes on the database has of the ML node."""
    return NodeApi(
        cluster=world.cluster,
        ml_node=world.ml_node,
        client=client,
        database=world.database,
        settings=world.settings,
        shared=True,
    ).jobs
