# SPDX-License-Identifier: Apache-2.0
"""Whom the PoC routes answer: every route, every kind of caller, every setting that decides it."""

import logging
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.routing import Route
from starlette.types import Message

from tests.support.servers.http_server import free_port, running
from tests.support.servers.pod import ARTIFACT, DISTANCE, PAUSING, SLOT, Pod, running_pod
from vllm_poc.server import admission
from vllm_poc.server.routes import create_app, router
from vllm_poc.server.service import PocService
from vllm_poc.wire.answers import ErrorResponse
from vllm_poc.wire.messages import API_PREFIX

TOKEN, KEY = "s3cret", "sk-chat"
STATUS = f"{API_PREFIX}/status"
NAMES = ("VLLM_POC_TOKEN", "--api-key", "VLLM_POC_OPEN")


APP = create_app(cast(PocService, None))


def _routes() -> list[tuple[str, str]]:
    """Every method and path that the app serves, and some that it does not."""
    served = [route for route in (*router.routes, *APP.routes) if isinstance(route, Route)]
    paths = {(method, re.sub(r"{\w+}", "x", route.path)) for route in served for method in route.methods or ()}
    return sorted(paths | {("GET", API_PREFIX), ("GET", f"{API_PREFIX}/nothing"), ("OPTIONS", STATUS)})


ROUTES = _routes()


@dataclass(frozen=True)
class Caller:
    """Who asks: the peer of the connection, and the headers of the request."""

    peer: str | None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_local: bool = False

    @property
    def sent(self) -> str:
        """The key of the Authorization header, whose scheme may be written in any case."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        return key if scheme.lower() == "bearer" else ""


LOCAL = ["127.0.0.1", "127.200.3.4", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1"]
REMOTE = ["10.1.2.3", "192.0.2.7", "fd00::1", "fe80::1%eth0", "::ffff:10.1.2.3", "::", "0.0.0.0", "128.0.0.1"]
#: What a proxy that runs beside the server adds to the requests of others, and a browser to those of a page.
FOREIGN = {
    "X-Forwarded-For": "127.0.0.1",
    "x-real-ip": "127.0.0.1",
    "Forwarded": "for=127.0.0.1",
    "VIA": "1.1 proxy",
    "X-Forwarded-Host": "localhost",
    "X-Forwarded-Client-Cert": "By=a",
    "X-Envoy-Attempt-Count": "1",
    "l5d-client-id": "a.b",
    "Origin": "http://localhost:8000",
}
CALLERS = {
    **{f"local {peer}": Caller(peer, is_local=True) for peer in LOCAL},
    **{f"remote {peer}": Caller(peer) for peer in REMOTE},
    "no peer": Caller(None),
    "empty peer": Caller(""),
    "named peer": Caller("localhost"),
    **{f"local with {name}": Caller("127.0.0.1", {name: value}) for name, value in FOREIGN.items()},
    "local with an empty header": Caller("127.0.0.1", {"X-Forwarded-For": ""}),
    "local with the token": Caller("127.0.0.1", {"Authorization": f"Bearer {TOKEN}"}, is_local=True),
    "remote with the token": Caller("10.1.2.3", {"Authorization": f"Bearer {TOKEN}"}),
    "remote with the key": Caller("10.1.2.3", {"Authorization": f"Bearer {KEY}"}),
    "remote with the key, by a proxy": Caller("127.0.0.1", {"Authorization": f"Bearer {KEY}", "Via": "1.1 proxy"}),
    "remote with the token, by a proxy": Caller("::1", {"Authorization": f"Bearer {TOKEN}", "Via": "1.1 proxy"}),
    "remote with the key, the scheme in capitals": Caller("10.1.2.3", {"Authorization": f"BEARER {KEY}"}),
    "remote with the token, the scheme in small letters": Caller("10.1.2.3", {"Authorization": f"bearer {TOKEN}"}),
    "remote with the token by another scheme": Caller("10.1.2.3", {"Authorization": f"Basic {TOKEN}"}),
    "remote with the token without a scheme": Caller("10.1.2.3", {"Authorization": TOKEN}),
    "remote with two spaces": Caller("10.1.2.3", {"Authorization": f"Bearer  {TOKEN}"}),
    "local with a wrong token": Caller("127.0.0.1", {"Authorization": "Bearer wrong"}, is_local=True),
    "remote with a wrong token": Caller("10.1.2.3", {"Authorization": "Bearer wrong"}),
    "remote with an empty token": Caller("10.1.2.3", {"Authorization": "Bearer "}),
}


@dataclass(frozen=True)
class Rule:
    """What is set, and by that whom the routes answer."""

    answers: str
    environment: Mapping[str, str] = field(default_factory=dict)
    api_key: list[str] | None = None

    def is_answered(self, caller: Caller) -> bool:
        """Whether the caller is one of those."""
        return {
            "token": caller.sent == TOKEN,
            "key": caller.sent == KEY,
            "everybody": True,
            "this machine": caller.is_local,
        }[self.answers]


_TOKEN, _OPEN = {"VLLM_POC_TOKEN": TOKEN}, {"VLLM_POC_OPEN": "1"}
RULES = {
    "nothing": Rule("this machine"),
    "not open": Rule("this machine", {"VLLM_POC_OPEN": "0"}),
    "empty keys": Rule("this machine", {"VLLM_API_KEY": ""}, [""]),
    "callbacks allowed": Rule("this machine", {"VLLM_POC_CALLBACK_ALLOW": "*"}),
    "open": Rule("everybody", _OPEN),
    "key": Rule("key", api_key=["other", KEY]),
    "key by variable": Rule("key", {"VLLM_API_KEY": KEY}),
    "key, open": Rule("key", _OPEN, [KEY]),
    "token": Rule("token", _TOKEN),
    "token, key": Rule("token", _TOKEN, [KEY]),
    "token, open": Rule("token", _TOKEN | _OPEN),
    "token, key, open": Rule("token", _TOKEN | _OPEN, [KEY]),
}


@pytest.fixture
def rule() -> Rule:
    """What is set; parametrise this name."""
    return RULES["nothing"]


@pytest.fixture
def pod_settings(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in rule.environment.items():
        monkeypatch.setenv(name, value)
    return {"FLUSH_SECONDS": "0.01"}


@pytest.fixture
def guarded(pod: Pod, rule: Rule) -> Pod:
    """A pod whose server was started as the rule says."""
    pod.app.state.args = SimpleNamespace(api_key=rule.api_key, uds=None)
    return pod


def calling(pod: Pod, caller: Caller) -> httpx.AsyncClient:
    """Return the client of a caller."""
    peer = None if caller.peer is None else (caller.peer, 50_000)
    transport = httpx.ASGITransport(pod.app, client=cast(Any, peer))
    return httpx.AsyncClient(transport=transport, base_url="http://pod", headers=caller.headers)


async def ask_status(pod: Pod, caller: Caller) -> httpx.Response:
    """Return the answer to the mildest of all requests."""
    async with calling(pod, caller) as http:
        return await http.get(STATUS)


def is_refused(answer: httpx.Response) -> bool:
    """Whether the answer is the refusal of a caller, in the form that all refusals have."""
    if answer.status_code != httpx.codes.UNAUTHORIZED:
        return False
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    if answer.request.method != "HEAD":
        assert ErrorResponse.model_validate(answer.json()).reason == "Unauthorized"
    return True


def test_every_operation_of_the_app_is_asked() -> None:
    described: Mapping[str, Any] = APP.openapi()["paths"]
    operations = {(verb.upper(), re.sub(r"{\w+}", "x", path)) for path, verbs in described.items() for verb in verbs}
    assert operations | {("GET", f"{API_PREFIX}/openapi.json")} <= set(ROUTES)
    assert ("GET", STATUS) in operations


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_a_route_answers_whom_the_settings_name_and_nobody_else(guarded: Pod, rule: Rule, caller: Caller) -> None:
    async with calling(guarded, caller) as http:
        answered = {(method, path) for method, path in ROUTES if not is_refused(await http.request(method, path))}
        assert answered == (set(ROUTES) if rule.is_answered(caller) else set())
        for path in ("/v1/models", "/metrics"):
            assert (await http.get(path)).status_code == 200, "vLLM's own routes are vLLM's to guard"


@pytest.mark.parametrize("caller", [CALLERS["remote 10.1.2.3"], CALLERS["local with X-Forwarded-For"]], ids=str)
async def test_the_refusal_names_the_settings_that_let_others_in(guarded: Pod, caller: Caller) -> None:
    detail = (await ask_status(guarded, caller)).json()["detail"]
    assert all(name in detail for name in NAMES)
    assert ("the header x-forwarded-for says" in detail) == bool(caller.headers)


async def test_before_the_engine_runs_nobody_else_learns_that() -> None:
    pod = Pod()
    assert is_refused(await ask_status(pod, CALLERS["remote 10.1.2.3"]))
    assert (await ask_status(pod, CALLERS["local ::1"])).json()["reason"] == "EngineNotReady"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (RULES["token"], "answer whoever sends the token of VLLM_POC_TOKEN"),
        (RULES["key"], "answer whoever sends a key of vLLM's --api-key"),
        (RULES["open"], "answer everybody"),
        (RULES["nothing"], "answer this machine alone: set VLLM_POC_TOKEN"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_log_says_at_the_start_who_is_answered(
    rule: Rule, says: str, pod_settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_pod(api_key=rule.api_key):
        pass
    (line,) = [line for line in caplog.messages if "PoC routes answer" in line]
    assert says in line
    assert not any(secret in line for secret in (TOKEN, KEY))


@pytest.mark.usefixtures("pod")  # which sets what any server needs
@pytest.mark.parametrize("api_key", [None, [KEY]], ids=["no keys", "keys of vLLM"])
async def test_every_route_follows_the_file_with_the_token(
    api_key: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("VLLM_POC_TOKEN_FILE", str(file))
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.0)
    async with running_pod(api_key=api_key) as pod:

        async def answered(token: str) -> set[tuple[str, str]]:
            async with calling(pod, Caller("10.1.2.3", {"Authorization": f"Bearer {token}"})) as http:
                commands = [("POST", path) for path in PAUSING if api_key]
                asked = [*ROUTES, *commands]
                return {(verb, path) for verb, path in asked if not is_refused(await http.request(verb, path))}

        everything = await answered(TOKEN)
        assert everything >= set(ROUTES)
        assert await answered("rotated") == set()
        (tmp_path / "new").write_text("rotated")
        (tmp_path / "new").rename(file)
        assert await answered(TOKEN) == set()
        refused = await ask_status(pod, CALLERS["remote with the token"])
        assert refused.json()["detail"].startswith("send the token of VLLM_POC_TOKEN_FILE as ")
        assert await answered("rotated") == everything
        file.unlink()
        assert await answered("rotated") == everything
        assert await answered("") == set()
    lines = [line for line in caplog.messages if "token" in line.lower()]
    assert [line for line in lines if "has changed" in line or "cannot be read" in line] == lines[1:]
    assert "answer whoever sends the token of VLLM_POC_TOKEN_FILE" in lines[0]
    assert len(lines) == 3
    assert not any(secret in line for line in lines for secret in (TOKEN, "rotated"))


# Callers as a real server sees them.


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    pytest.skip("this machine has no address besides loopback")


@asynccontextmanager
async def listening(pod: Pod, host: str) -> AsyncIterator[int]:
    """Serve at an address as vLLM does: ``::`` takes both IP versions. Yield the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, free_port()))
        async with running(uvicorn.Config(pod.app, log_level="warning"), [listener]):
            yield listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "0.0.0.0"])
async def test_a_real_server_answers_its_own_machine(pod: Pod, host: str) -> None:
    async with listening(pod, host) as port, httpx.AsyncClient(timeout=30, base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get(STATUS)).status_code == 200
        # uvicorn itself believes this header of a proxy on the same machine.
        assert is_refused(await http.get(STATUS, headers={"X-Forwarded-For": "127.0.0.1"}))
        assert is_refused(await http.get(STATUS, headers={"X-Forwarded-For": "10.1.2.3"}))


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
async def test_a_real_server_refuses_whoever_comes_by_the_network(pod: Pod, host: str) -> None:
    address = own_address()
    async with listening(pod, host) as port, httpx.AsyncClient(timeout=30, base_url=f"http://{address}:{port}") as http:
        assert is_refused(await http.get(STATUS))
        assert is_refused(await http.get(STATUS, headers={"X-Forwarded-For": "127.0.0.1"}))


@pytest.mark.parametrize("forwarded", [False, True])
async def test_a_unix_socket_is_of_this_machine(pod: Pod, tmp_path: Path, forwarded: bool) -> None:
    path = str(tmp_path / "vllm.sock")
    pod.app.state.args = SimpleNamespace(uds=path)
    headers = {"X-Forwarded-For": "10.1.2.3"} if forwarded else {}
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with (
        running(uvicorn.Config(pod.app, uds=path, log_level="warning")),
        httpx.AsyncClient(transport=transport, base_url="http://vllm") as http,
    ):
        assert is_refused(await http.get(STATUS, headers=headers)) == forwarded


@pytest.mark.parametrize("server", [("127.0.0.1", 8000), ("127.0.0.1", None), ("/run/other.sock", None)], ids=str)
async def test_a_connection_whose_peer_is_not_known_is_of_nobody(pod: Pod, server: tuple[str, int | None]) -> None:
    """uvicorn knows no peer of a connection that is over, either."""
    answers: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        answers.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": STATUS,
        "query_string": b"",
        "headers": [],
        "client": None,
    }
    for uds in (None, "/run/vllm.sock"):
        pod.app.state.args = SimpleNamespace(uds=uds)
        await pod.app({**scope, "server": server}, receive, send)
    assert [message["status"] for message in answers if "status" in message] == [401, 401]


# Where results may go.

HERE = ["http://127.0.0.1:9/x", "http://localhost:9/x", "http://[::1]:9/x", "http://127.9.9.9/x"]
ELSEWHERE = [
    *("http://evil/x", "http://10.1.2.3/x", "http://127.evil.org/x", "http://localhost.evil.org/x"),
    *("http://169.254.169.254/latest", "http://0.0.0.0/x"),
]
WORK = {
    "url": ("init/generate", ARTIFACT | SLOT),
    "callback_url": ("init/generate", DISTANCE | SLOT),
    "url of a queue": ("generate", ARTIFACT | {"nonces": [1], "wait": False}),
    "callback_url of init": ("init", DISTANCE | SLOT),
    "callback_url of validate": ("init/validate", DISTANCE),
}
_KEYS = Caller("10.1.2.3", {"Authorization": f"Bearer {KEY}"})
_TOKENS = Caller("10.1.2.3", {"Authorization": f"Bearer {TOKEN}"})
_HERE = Caller("127.0.0.1", is_local=True)
_LIST = {"VLLM_POC_CALLBACK_ALLOW": "evil, *.evil.org"}
#: Who asks whom, and to where results may then go.
DELIVERIES = {
    "token": (RULES["token"], _TOKENS, [*HERE, *ELSEWHERE]),
    "token, open": (RULES["token, open"], _TOKENS, [*HERE, *ELSEWHERE]),
    "key": (RULES["key"], _KEYS, []),
    "open": (RULES["open"], _HERE, []),
    "nothing": (RULES["nothing"], _HERE, HERE),
    "token, list": (Rule("token", _TOKEN | _LIST), _TOKENS, [ELSEWHERE[0], *ELSEWHERE[2:4]]),
    "key, list": (Rule("key", _LIST, [KEY]), _KEYS, [ELSEWHERE[0], *ELSEWHERE[2:4]]),
    "nothing, list": (Rule("this machine", _LIST), _HERE, [ELSEWHERE[0], *ELSEWHERE[2:4]]),
    "open, any": (Rule("everybody", _OPEN | {"VLLM_POC_CALLBACK_ALLOW": "*"}), _HERE, [*HERE, *ELSEWHERE]),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("rule", "caller", "allowed"), DELIVERIES.values(), ids=DELIVERIES)
async def test_results_go_to_allowed_hosts_only(
    guarded: Pod, rule: Rule, caller: Caller, allowed: list[str], work: str
) -> None:
    (route, body), name = WORK[work], work.partition(" ")[0]
    async with calling(guarded, caller) as http:
        assert (await http.get(STATUS)).status_code == 200
        guarded.engine.output_processor.busy = True  # nothing is computed, so nothing is sent
        for url in [*HERE, *ELSEWHERE]:
            answer = await http.post(f"{API_PREFIX}/{route}", json=body | {name: url})
            if url in allowed:
                assert answer.status_code == 200, (url, answer.text)
                await http.post(f"{API_PREFIX}/stop")
                continue
            error = ErrorResponse.model_validate(answer.json())
            assert (answer.status_code, error.errors[0].field) == (422, name), url
            assert "VLLM_POC_CALLBACK_ALLOW" in error.detail
            assert ("VLLM_POC_TOKEN" in error.detail) == ("VLLM_POC_CALLBACK_ALLOW" not in rule.environment)
