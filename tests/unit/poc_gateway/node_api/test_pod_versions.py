# SPDX-License-Identifier: Apache-2.0
"""What the gateway remembers of its pods' versions, for how long, and what it says of all of them together."""

from collections.abc import Sequence

import pytest

from poc_gateway.node_api import pod_versions
from poc_gateway.node_api.pod_versions import (
    ASK_AGAIN_SECONDS,
    KNOWN_SECONDS,
    RETRY_SECONDS,
    PodVersionsCache,
    common_schemes,
    plugin_release,
)
from poc_operator.clients.pods.reference_pods import PodVersions
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.reference_pod import reference_pod
from tests.support.servers.http_server import serve
from tests.unit.poc_gateway.node_api.cluster import World
from tests.unit.poc_gateway.node_api.requests import INIT, PARAMS, error_of
from vllm_poc.wire.messages import Scheme

BOTH, PREFILL = [Scheme.PREFILL, Scheme.DECODE], [Scheme.PREFILL]
OURS, DECODING = PodVersions(schemes=["prefill"]), PodVersions(schemes=["prefill", "decode"])
REBUILT = PodVersions(schemes=["prefill", "decode"], rebuilt_codebook=True)
OLD, NEW = PodVersions(gonka_poc_version="0.1.7"), PodVersions(gonka_poc_version="0.2.0")
FIRST, SECOND = ("pod", "container#0"), ("pod", "container#1")


@pytest.mark.parametrize(
    ("told", "schemes", "release"),
    [
        ([], [], None),
        ([NEW], BOTH, "0.2.0"),
        ([NEW, OLD], PREFILL, "0.1.7"),
        ([OLD, NEW], PREFILL, "0.1.7"),
        ([DECODING], BOTH, None),
        ([DECODING, NEW], BOTH, "0.2.0"),
        # A client that knows releases alone would take 0.2.0 for a promise.
        ([NEW, OURS], PREFILL, None),
        ([NEW, None], PREFILL, None),
        ([DECODING, REBUILT], PREFILL, None),
        ([PodVersions(schemes=["later"])], [], None),
    ],
)
def test_the_ml_node_offers_what_all_of_its_pods_do(
    told: Sequence[PodVersions | None], schemes: list[Scheme], release: str | None
) -> None:
    assert (common_schemes(told), plugin_release(told)) == (schemes, release)


def test_answers_end() -> None:
    clock = FakeClock()
    cache = PodVersionsCache(clock.now)
    cache.put({FIRST: OLD}, servers=[FIRST])
    clock.advance(ASK_AGAIN_SECONDS - 1)
    assert cache.due([FIRST, SECOND]) == {SECOND}
    clock.advance(1)
    assert cache.due([FIRST]) == {FIRST}
    cache.put({FIRST: None}, servers=[FIRST])
    assert cache.get(FIRST) == OLD  # it may be late once
    assert cache.due([FIRST]) == set(), "each call would wait for a pod that hangs"
    clock.advance(RETRY_SECONDS)
    assert cache.due([FIRST]) == {FIRST}
    clock.advance(KNOWN_SECONDS - ASK_AGAIN_SECONDS - RETRY_SECONDS)
    cache.put({FIRST: None}, servers=[FIRST])
    assert cache.get(FIRST) is None
    cache.put({FIRST: OLD, SECOND: NEW}, servers=[FIRST, SECOND])
    cache.put({}, servers=[SECOND])
    assert (cache.get(FIRST), cache.get(SECOND)) == (None, NEW)


async def test_a_pod_that_has_another_image_is_asked_again(podless: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the API server tells of the same container, as where a sidecar comes first and no port is declared."""
    init = INIT | {"params": PARAMS | {"decode": True, "max_tokens": 256}}
    async with reference_pod("0.1.7") as pod, serve(pod.app, "127.0.0.1", podless.port):
        podless.announce("127.0.0.1")
        told = (await podless.get("pow/versions")).json()
        assert (told["gonka_poc_version"], told["schemes"]) == ("0.1.7", ["prefill"])
        answer = await podless.post("inference/pow/init/generate", init)
        detail = error_of(answer, 422, "InvalidRequest").detail
        assert "add pods of the network's plugin 0.2 or later" in detail
        assert "image" not in detail
        pod.release = "0.2.0"
        monkeypatch.setattr(pod_versions, "ASK_AGAIN_SECONDS", 0.0)
        for path in ("pow/versions", "inference/pow/versions", "versions"):
            told = (await podless.get(path)).json()
            assert (told["gonka_poc_version"], told["schemes"]) == ("0.2.0", ["prefill", "decode"])
        assert (await podless.post("inference/pow/init/generate", init)).status_code == 200


async def test_our_pods_name_no_release_of_the_networks_plugin(world: World) -> None:
    told = (await world.get("pow/versions")).json()
    assert "gonka_poc_version" not in told
    assert told["schemes"] == ["prefill"]
