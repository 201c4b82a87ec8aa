# SPDX-License-Identifier: Apache-2.0
"""What an ML node tells of itself when not all is well: pods that hang, lie low, or lack something."""

import asyncio
import logging
import re
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from poc_gateway import __version__
from poc_gateway.node_api import cluster, generate_routes, node_metrics
from poc_gateway.node_api.cluster import ASK_SECONDS
from poc_gateway.node_api.node_metrics import Exposition, NodeMetrics, Series, of_gpus, of_vllm
from poc_gateway.node_api.service import NodeApi
from poc_gateway.server.health import MlNodeHealth
from poc_operator.clients.errors import StoreUnavailable
from tests.docs.pages import ROOT
from tests.support.servers.http_server import serve
from tests.unit.poc_gateway.node_api.cluster import World, running_world
from tests.unit.poc_gateway.node_api.requests import error_of, validation
from vllm_poc.server import nvml
from vllm_poc.wire.answers import Gpu, GpusResponse

VLLM = """
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/models/tiny"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="/models/tiny"} 7.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="/models/tiny"} 1.7e+09
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="/models/tiny"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="/models/tiny"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="/models/tiny"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="/models/tiny"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",folder="/root/x",peer="10.0.0.1:80"} 1.0
vllm:unknown_total{engine="0"} 5.0
poc_state{state="IDLE"} 1.0
"""


class Pretender:
    """A pod's server that never answers; or another's words, with ``text``."""

    def __init__(self, text: str | None = None) -> None:
        self._text = text

    async def __call__(self, scope: Any, _: Any, send: Any) -> None:  # noqa: ANN401
        if self._text is None and scope["type"] == "http":
            await asyncio.sleep(30)
        if scope["type"] == "http":
            assert self._text is not None
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": self._text.encode()})


def test_the_release_is_that_of_the_project() -> None:
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()


async def test_a_pod_that_hangs_does_not_hold_the_state_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ASK_SECONDS", ASK_SECONDS)
    async with serve(Pretender(), "127.0.0.3", world.port):
        world.announce("127.0.0.3")
        begin = monotonic()
        state = (await world.get("state")).json()
        assert monotonic() - begin < 4.9  # the client gives up after 5 s
        # It has not proven that inference goes on while it validates.
        assert (state["state"], state["poc_validation_inference"]) == ("INFERENCE", False)


async def test_a_pod_that_does_not_prove_it_stops_inference_in_a_validation(world: World) -> None:
    assert (await world.get("versions")).json()["poc_validation_inference"] is True
    async with serve(Pretender('{"vllm_version": "0.25.1"}'), "127.0.0.3", world.port):
        world.announce("127.0.0.3")
        assert (await world.get("versions")).json()["poc_validation_inference"] is False
        assert (await world.get("pow/versions")).json()["poc_validation_inference"] is False


async def test_without_pods_the_node_is_well_and_stopped(podless: World) -> None:
    told = (await podless.http.get("/health")).json()
    assert (told["status"], told["service_state"]) == ("healthy", "STOPPED")
    assert told["managers"]["inference"] == {"running": False, "healthy": False}
    versions = (await podless.get("versions")).json()
    told = {"vllm_version": None, "gonka_poc_version": None, "poc_validation_inference": False, "schemes": []}
    assert versions == {"version": __version__} | told
    error_of(await podless.get("pow/versions"), 503, "NoBackends")
    up = (await podless.get("inference/up/status")).json()
    assert up == {"is_running": False, "status": "not_started", "error": None}
    assert (await podless.post("inference/up/async", {"model": "tiny"})).status_code == 202


async def test_pods_that_are_not_ready_are_starting(tmp_path: Path) -> None:
    spec = {"selector": {"matchLabels": {"poc.gonka.ai/worker": "true"}}, "model": {"name": "tiny"}}
    async with running_world(tmp_path, pods=0, one={"template": {"namespace": "ns", "spec": spec}}) as world:
        status = {"hf_repo": "tiny"}
        assert (await world.post("models/status", status)).json()["status"] == "NOT_FOUND"
        world.announce("127.0.0.1", ready=False)
        assert (await world.get("inference/up/status")).json()["status"] == "starting"
        assert (await world.post("models/status", status)).json()["status"] == "DOWNLOADING"
        assert (await world.post("models/download", status)).json()["status"] == "DOWNLOADING"
        assert (await world.post("models/status", {"hf_repo": "x"})).json()["status"] == "NOT_FOUND"


async def test_pods_of_which_none_answers_make_the_node_ill(podless: World) -> None:
    podless.announce("127.0.0.1")  # where nobody listens
    for path in ("/health", "/livez", "/readyz"):
        answer = await podless.http.get(path)
        assert "1 pods are ready, and none of them answers" in error_of(answer, 503, "NotReady").detail
    assert (await podless.http.get("/readyz")).json()["ready"] is False


async def test_those_who_ask_for_the_health_together_get_one_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[NodeApi](), MlNodeHealth._ask

    async def counted(self: MlNodeHealth, node: NodeApi) -> dict[str, Any]:
        asked.append(node)
        return await ask(self, node)

    monkeypatch.setattr(MlNodeHealth, "_ask", counted)
    answers = await asyncio.gather(*(world.http.get("/health") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(asked) == 1


async def test_without_the_api_server_versions_are_still_answered(world: World) -> None:
    world.cluster.fault = StoreUnavailable("HTTP 500: down")
    assert (await world.get("versions")).json()["vllm_version"] is None
    error_of(await world.http.get("/health"), 503, "NotReady")


async def test_what_takes_too_long_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_routes, "WAIT_SECONDS", 0.3)
    for pod in world.pods.values():
        pod.engine.seconds_per_batch = 0.5
    answer = await world.post("inference/pow/generate", validation(wait=True))
    assert "send the request without wait" in error_of(answer, 503, "NotInTime").detail
    assert world.service.jobs._dispatcher.nonces == 0


async def test_gpus_are_numbered_through_all_pods(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Gpu(index=0, name="NVIDIA H200", memory_total_bytes=2**37, memory_free_bytes=2**36, temperature_celsius=41)
    told = GpusResponse(devices=[h200, Gpu(index=1, error="GPU is lost")], driver_version="580.1", nvml_version="13")
    monkeypatch.setattr("vllm_poc.server.routes.read_gpus", lambda: told)
    answer = (await world.get("gpu/devices")).json()
    assert (answer["count"], [one["index"] for one in answer["devices"]]) == (4, [0, 1, 2, 3])
    first, lost = answer["devices"][2:]
    assert (first["name"], first["total_memory_mb"], first["free_memory_mb"]) == ("NVIDIA H200", 131_072, 65_536)
    assert (first["used_memory_mb"], first["temperature_c"], first["is_available"]) == (None, 41, True)
    assert (lost["is_available"], lost["error_message"]) == (False, "GPU is lost")
    driver = {"driver_version": "580.1", "cuda_driver_version": None, "nvml_version": "13"}
    assert (await world.get("gpu/driver")).json() == driver
    text = (await world.get("metrics")).text
    assert 'mlnode_gpu_temp_core_celsius{gpu_index="2",gpu_model="NVIDIA H200"} 41\n' in text
    assert re.search(r'mlnode_source_scrape_timestamp_seconds\{source="nvml"\} \d{10}\n', text)
    assert "mlnode_gpu_power" not in text  # no sensor, no series
    assert nvml.read_gpus() == GpusResponse()


def test_vllms_series_get_the_schemas_labels() -> None:
    kinds = node_metrics._FIRST | node_metrics._SECOND
    lines = [one.line for one in of_vllm(VLLM, kinds, 1, "org/tiny")]
    labels = 'model_name="org/tiny",replica="1"'
    assert lines == [
        f"vllm:num_requests_running{{{labels}}} 3.0\n",
        f'vllm:request_success_total{{{labels},finished_reason="stop"}} 7.0\n',
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.001"}} 0.0\n',
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} 2.0\n',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 2.0\n",
        f"vllm:time_to_first_token_seconds_sum{{{labels}}} 0.5\n",
        f'vllm:cache_config_info{{{labels},block_size="16",cache_dtype="auto"}} 1.0\n',
    ]
    (unnamed,) = of_vllm(VLLM, {"vllm:num_requests_running": "gauge"}, 0, None)
    assert unnamed.labels["model_name"] == "tiny"


def test_series_beyond_the_bounds_are_left_out_by_blocks(caplog: pytest.LogCaptureFixture) -> None:
    exposition = Exposition(max_series=3)
    block = [Series("a", "gauge", "a", {"x": str(number)}, "1") for number in range(2)]
    assert exposition.add(block)
    assert exposition.add(block)  # nothing new
    assert not exposition.add([Series("b", "gauge", "b", {"x": str(number)}, "1") for number in range(2)])
    assert exposition.add([Series("a", "gauge", "a", {"x": "9"}, "1")])
    assert exposition.text() == '# TYPE a gauge\na{x="0"} 1\na{x="1"} 1\na{x="9"} 1\n'
    assert not Exposition(max_bytes=100).add(block * 1 + [Series("c", "gauge", "c", {"x": "y" * 90}, "1")])
    # A large ML node: 8 GPUs in each of 400 pods, and vLLM in each.
    many = "".join(f'vllm:e2e_request_latency_seconds_bucket{{le="{le}"}} 1\n' for le in range(30)) + VLLM
    pods: Any = None
    with caplog.at_level(logging.WARNING):
        replicas = dict.fromkeys(range(400), many)
        text = NodeMetrics(pods, model="m", version="1")._compose(
            replicas,
            400,
            [],
            "1",
        )
    assert "leave no room for" in caplog.text
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) <= 5_000
    assert len(text.encode()) <= 2 * 2**20
    # What matters most is there of all replicas.
    assert sum(line.startswith("vllm:num_requests_running") for line in series) == 400


def test_a_gpu_without_sensors_has_no_series() -> None:
    assert of_gpus([Gpu(index=0, error="GPU is lost")]) == []


async def test_metrics_are_asked_of_pods_once_in_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (await world.get("metrics")).text
    assert 'mlnode_config_info{model_name="",dtype="",replicas="2"' in first
    assert first.count('mlnode_source_scrape_timestamp_seconds{source="vllm"') == 2
    world.cluster.pods.clear()
    assert (await world.get("metrics")).text == first
    monkeypatch.setattr(node_metrics, "CACHE_SECONDS", 0.0)
    assert 'replicas="0"' in (await world.get("metrics")).text
