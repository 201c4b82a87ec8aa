# SPDX-License-Identifier: Apache-2.0
"""Clients that connect and send nothing, or begin a body and stall, against a gateway in a process of its own."""

import asyncio
import json
import resource
import select
import socket
import ssl
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from poc_gateway.server.connections import Connections, bounded_by
from poc_gateway.server.standby import Gate
from poc_gateway.settings import Settings
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.certificates import issue, settings_of
from tests.support.builders.deliveries import JSON, artifacts, path, round_body
from tests.support.builders.forwarding import until
from tests.support.servers.http_server import free_port

HALF_OPEN, STALLED = 2_000, 50
#: What slow clients may add to an honest delivery.
MOST_SECONDS = 1.0
#: The begin of a TLS record with a ClientHello that never ends.
HALF_OF_A_HELLO = bytes.fromhex("160301020001")
HEAD = b"POST %s HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[GatewayProcess]:
    """A gateway that begins with 1 024 file descriptors, as a shell's child does."""
    rounds = folder / "rounds.json"
    rounds.write_text(json.dumps([round_body()]))
    names = {f"POC_GATEWAY_{name.upper()}": value for name, value in settings.items()}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, most))
    try:
        running = gateway(f"sqlite:///{folder}/gateway.db", rounds, folder / "log", names)
        with running as process:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            yield process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def serving_tls(folder: Path, **settings: str) -> Iterator[GatewayProcess]:
    """The same, with TLS at the network's port."""
    issue(folder, "gateway")
    tls = {name.removeprefix("POC_GATEWAY_").lower(): value for name, value in settings_of(folder).items()}
    with serving(folder, **tls, **settings) as running:
        yield running


def connect(stack: ExitStack, running: GatewayProcess, source: str, *, network: bool = False) -> socket.socket:
    address = ("127.0.0.1", urlsplit(running.network_url if network else running.url).port or 0)
    connection = stack.enter_context(socket.create_connection(address, source_address=(source, 0)))
    # Thousands that linger after a test would take ports that the next gateway is told to listen at.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


def deliver(client: httpx.Client, url: str, first: int, count: int = 20) -> list[float]:
    """Deliver one result at a time; return how long each took."""
    seconds = list[float]()
    for nonce in range(first, first + count):
        began = time.monotonic()
        client.post(url + path(), content=artifacts([nonce]), headers=JSON).raise_for_status()
        seconds.append(time.monotonic() - began)
    return seconds


def trusting(folder: Path) -> ssl.SSLContext:
    """What a client needs that trusts the certificate in this folder."""
    return ssl.create_default_context(cafile=str(folder / "tls.crt"))


def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Read once; return whether that was the end."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def opened_of(connections: list[socket.socket], *, closed: int) -> list[socket.socket]:
    """Wait until so many are closed by the server, and a moment longer; return the others."""
    end = time.monotonic() + 20
    while len(select.select(connections, [], [], 0)[0]) < closed:
        assert time.monotonic() < end, f"fewer than {closed} are closed"
        time.sleep(0.02)
    time.sleep(0.3)
    over = set(select.select(connections, [], [], 0)[0])
    assert all(is_closed(connection, 1) for connection in over)
    return [connection for connection in connections if connection not in over]


def admitted(stack: ExitStack, running: GatewayProcess, *, network: bool = False) -> socket.socket:
    """Connect until the server keeps a connection: it learns of closed ones a moment later."""
    end = time.monotonic() + 20
    while is_closed(found := connect(stack, running, "127.0.0.2", network=network), 0.5):
        assert time.monotonic() < end, "no connection is kept"
    found.settimeout(20)
    return found


@pytest.mark.parametrize("peer_connections", ["1000", "100000"])
def test_half_open_connections_hold_up_no_delivery(tmp_path: Path, peer_connections: str) -> None:
    with serving(tmp_path, peer_connections=peer_connections) as running, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=30))
        alone = deliver(client, running.url, 0)
        for number in range(HALF_OPEN):
            connection = connect(stack, running, "127.0.0.2")
            if number % 2:
                connection.sendall(b"POST / HTTP/1.1\r\nHost")
        new = stack.enter_context(httpx.Client(timeout=30))  # which has to connect
        beside = deliver(new, running.url, 100)
        assert statistics.median(beside) - statistics.median(alone) < MOST_SECONDS
        assert max(beside) - max(alone) < 10 * MOST_SECONDS


def test_the_process_takes_all_descriptors_that_it_may_have(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        limits = Path(f"/proc/{running.process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert soft == hard


@pytest.mark.parametrize("peer_connections", ["1000", "100000"])
def test_half_open_handshakes_hold_up_no_delivery(tmp_path: Path, peer_connections: str) -> None:
    with serving_tls(tmp_path, peer_connections=peer_connections) as running, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=30))
        alone = deliver(client, running.url, 0)
        opened = [connect(stack, running, "127.0.0.2", network=True) for _ in range(HALF_OPEN)]
        for connection in opened[::2]:
            with suppress(ConnectionError):  # those beyond the peer's are closed
                connection.sendall(HALF_OF_A_HELLO)
        beside = deliver(stack.enter_context(httpx.Client(timeout=30)), running.url, 100)
        assert statistics.median(beside) - statistics.median(alone) < MOST_SECONDS
        assert max(beside) - max(alone) < 10 * MOST_SECONDS
        closed = sum(is_closed(connection, 0.001) for connection in opened)
        assert closed == max(0, HALF_OPEN - int(peer_connections))
        network = httpx.Client(timeout=30, verify=trusting(tmp_path), trust_env=False)
        answer = stack.enter_context(network).get(running.network_url.replace("http:", "https:") + "/readyz")
        assert answer.status_code == 200


def test_a_handshake_has_the_headers_deadline(tmp_path: Path) -> None:
    with serving_tls(tmp_path, header_seconds="4") as running, ExitStack() as stack:
        silent, slow, late = (connect(stack, running, "127.0.0.1", network=True) for _ in range(3))
        began = time.monotonic()
        slow.sendall(HALF_OF_A_HELLO)
        time.sleep(2.5)
        # It shakes hands in time, and asks for nothing: the deadline is of both together.
        shaken = stack.enter_context(trusting(tmp_path).wrap_socket(late, server_hostname="127.0.0.1"))
        for connection in (silent, slow, shaken):
            assert is_closed(connection, 20)
            assert 3.8 < time.monotonic() - began < 6.4


def test_handshakes_count_among_the_connections_of_a_peer(tmp_path: Path) -> None:
    with serving_tls(tmp_path, peer_connections="5") as running, ExitStack() as stack:
        # At either port: which one accepts first is open.
        opened = [connect(stack, running, "127.0.0.2", network=index % 2 == 0) for index in range(8)]
        kept = opened_of(opened, closed=3)
        assert len(kept) == 5
        kept[0].close()
        left = admitted(stack, running, network=True)
        with trusting(tmp_path).wrap_socket(left, server_hostname="127.0.0.1") as shaken:
            shaken.settimeout(20)
            shaken.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert shaken.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_handshakes_do_not_hold_up_the_end(tmp_path: Path) -> None:
    with serving_tls(tmp_path) as running, ExitStack() as stack:
        connection = connect(stack, running, "127.0.0.1", network=True)
        connection.sendall(HALF_OF_A_HELLO)
        time.sleep(0.2)
        running.process.terminate()
        assert running.process.wait(5) == 0


async def test_when_there_are_too_many_who_waits_longest_makes_room() -> None:
    port = free_port()
    config = uvicorn.Config(Gate(), host="127.0.0.1", port=port, log_config=None, lifespan="off")
    config.http = bounded_by(Connections(Settings(), most=5))
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(7)]
    for reader, _ in opened[:2]:
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    for reader, writer in opened[2:]:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
    server.should_exit = True
    await task


def test_a_peer_has_so_many_connections_and_others_have_theirs(tmp_path: Path) -> None:
    with serving(tmp_path, peer_connections="5") as running, ExitStack() as stack:
        connections = [connect(stack, running, "127.0.0.2") for _ in range(8)]
        assert [is_closed(connection, 20) for connection in connections[5:]] == [True] * 3
        assert [is_closed(connection, 0.1) for connection in connections[:5]] == [False] * 5
        client = stack.enter_context(httpx.Client(timeout=30))
        deliver(client, running.url, 0, 1)
        for connection in connections:
            connection.close()
        admitted(stack, running)
    assert "127.0.0.2 has 5 connections" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_header_has_a_deadline(tmp_path: Path, sent: bytes) -> None:
    with serving(tmp_path, header_seconds="1") as running, ExitStack() as stack:
        connection = connect(stack, running, "127.0.0.1")
        connection.sendall(sent)
        began = time.monotonic()
        for _ in range(3):  # more of it does not help
            if sent:
                connection.sendall(b"x")
            time.sleep(0.2)
        assert is_closed(connection, 20)
        assert 0.9 < time.monotonic() - began < 10
        # The second request of a connection has one too; between two requests it may rest.
        kept = connect(stack, running, "127.0.0.1")
        kept.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
        time.sleep(2)
        kept.sendall(b"GET /readyz HTTP/1.1\r\n")
        kept.settimeout(5)
        while not is_closed(kept, 5):
            assert time.monotonic() - began < 30


def test_a_body_has_a_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, body_seconds="1") as running, ExitStack() as stack:
        connection = connect(stack, running, "127.0.0.1")
        connection.sendall(HEAD % (path().encode(), 1_000) + b"{")
        connection.settimeout(30)
        answer = b""
        while more := connection.recv(65_536):
            answer += more
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"RequestTimeout" in answer


def test_stalled_bodies_hold_up_no_delivery(tmp_path: Path) -> None:
    """They have more bytes under way than all bodies may have together."""
    with serving(tmp_path) as running, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=30))
        alone = deliver(client, running.url, 0)
        for _ in range(STALLED):
            connection = connect(stack, running, "127.0.0.2")
            connection.sendall(HEAD % (path().encode(), 16_000_000) + b" " * 1_500_000)
        time.sleep(1.5)
        beside = deliver(client, running.url, 100)
        assert statistics.median(beside) - statistics.median(alone) < MOST_SECONDS
        large = artifacts(range(1_000, 31_000))
        began = time.monotonic()
        client.post(running.url + path(), content=large, headers=JSON).raise_for_status()
        assert time.monotonic() - began < 25
