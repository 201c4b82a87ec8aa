# SPDX-License-Identifier: Apache-2.0
"""TLS at the network's port of a real gateway process, and certificates that are renewed while it runs."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from poc_gateway.server import tls
from poc_gateway.server.tls import Certificate
from poc_gateway.settings import Settings
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.certificates import issue, settings_of

SPEC = {"selector": {"matchLabels": {"a": "b"}}}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[GatewayProcess]:
    issue(tmp_path, "first")
    (tmp_path / "rounds.json").write_text("[]")
    ml_nodes = tmp_path / "ml-nodes.json"
    ml_nodes.write_text(json.dumps([{"name": "a", "template": {"namespace": "ns", "spec": SPEC}}]))
    settings = settings_of(tmp_path) | {"POC_GATEWAY_ML_NODES": str(ml_nodes)}
    with gateway(f"sqlite:///{tmp_path}/db", tmp_path / "rounds.json", tmp_path / "log", settings) as running:
        yield running


def test_the_networks_port_alone_speaks_tls(running: GatewayProcess, tmp_path: Path) -> None:
    address = running.network_url.removeprefix("http://")
    trust = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    with httpx.Client(timeout=30, verify=trust, trust_env=False) as client:
        assert client.get(f"https://{address}/nodes/a/api/v1/state").json()["state"] == "STOPPED"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{address}/readyz", trust_env=False, timeout=30)
    assert httpx.get(f"{running.url}/readyz", trust_env=False, timeout=30).status_code == 200


def test_a_server_ends_in_order_with_both_ports(running: GatewayProcess) -> None:
    running.process.terminate()
    assert running.process.wait(20) == 0


async def test_a_renewed_certificate_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.05)
    issue(tmp_path, "first")
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context)
    port = server.sockets[0].getsockname()[1]
    watching = asyncio.create_task(certificate.watch())

    async def served() -> bytes:
        return (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))).strip().encode()

    async def becomes(wanted: bytes) -> bool:
        for _ in range(100):
            if await served() == wanted:
                return True
            await asyncio.sleep(0.05)
        return False

    first = (tmp_path / "tls.crt").read_bytes().strip()
    assert await becomes(first)
    # Half of a change: the key is not the certificate's.
    other = tmp_path / "other"
    other.mkdir()
    issue(other, "second")
    (tmp_path / "tls.key").write_bytes((other / "tls.key").read_bytes())
    await asyncio.sleep(0.3)
    assert await served() == first
    (tmp_path / "tls.crt").write_bytes((other / "tls.crt").read_bytes())
    assert await becomes((other / "tls.crt").read_bytes().strip())
    watching.cancel()
    server.close()


def test_files_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    with pytest.raises(ValueError, match=r"POC_GATEWAY_TLS_CERT=.*No such file"):
        Certificate(certificate, key)
    certificate.write_text("x")
    key.write_text("x")
    with pytest.raises(ValueError, match="both must be PEM files"):
        Certificate(certificate, key)


@pytest.mark.parametrize("name", ["POC_GATEWAY_TLS_CERT", "POC_GATEWAY_TLS_KEY"])
def test_one_without_the_other_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="set POC_GATEWAY_TLS_CERT and POC_GATEWAY_TLS_KEY, or neither"):
        Settings.from_environment({name: "/x"})


def test_without_files_there_is_no_tls() -> None:
    assert Certificate.of(None, None) is None
