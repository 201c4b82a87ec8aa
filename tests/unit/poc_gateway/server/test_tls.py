# SPDX-License-Identifier: Apache-2.0
"""TLS at the network's port of a real gateway process, and certificates that are renewed while it runs."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY
from pydantic import ValidationError

from poc_gateway.server import tls
from poc_gateway.server.tls import Certificate
from poc_gateway.settings import Settings
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.certificates import issue, issue_expired, settings_of

SPEC = {"selector": {"matchLabels": {"a": "b"}}}


def told_expiry() -> float | None:
    return REGISTRY.get_sample_value("poc_gateway_certificate_expiration_timestamp_seconds", {"port": "network"})


def expiry_by_openssl(path: Path) -> float:
    """Return what OpenSSL says of the first certificate of a file, in seconds since 1970."""
    argv = ["openssl", "x509", "-enddate", "-noout", "-in", str(path)]
    text = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    return float(ssl.cert_time_to_seconds(text.removeprefix("notAfter=")))


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
    told = httpx.get(f"{running.url}/health", trust_env=False, timeout=30).json()
    expires = datetime.fromisoformat(told.pop("certificate_expires"))
    assert told == {"status": "OK"}
    assert expires.timestamp() == expiry_by_openssl(tmp_path / "tls.crt")


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
    expires = expiry_by_openssl(tmp_path / "tls.crt")
    assert certificate.expires is not None
    assert told_expiry() == certificate.expires.timestamp() == expires
    # Half of a change: the key is not the certificate's.
    other = tmp_path / "other"
    other.mkdir()
    issue(other, "second", days=5)
    (tmp_path / "tls.key").write_bytes((other / "tls.key").read_bytes())
    await asyncio.sleep(0.3)
    assert await served() == first
    assert told_expiry() == expires
    (tmp_path / "tls.crt").write_bytes((other / "tls.crt").read_bytes())
    assert await becomes((other / "tls.crt").read_bytes().strip())
    # What is told belongs to what is served.
    assert told_expiry() == certificate.expires.timestamp() == expiry_by_openssl(other / "tls.crt")
    watching.cancel()
    server.close()


def test_the_servers_own_certificate_counts_and_not_that_of_its_issuer(tmp_path: Path) -> None:
    issue(tmp_path, "leaf", days=3)
    issuer = tmp_path / "issuer"
    issuer.mkdir()
    issue_expired(issuer, "issuer")
    chain = (tmp_path / "tls.crt").read_text() + (issuer / "tls.crt").read_text()
    wanted = expiry_by_openssl(tmp_path / "tls.crt")
    (tmp_path / "tls.crt").write_text(chain)
    Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert told_expiry() == wanted


def test_an_expiry_that_cannot_be_read_keeps_nobody_from_being_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    issue(tmp_path, "first")

    def fails(_: Path) -> datetime:
        raise ValueError("error parsing asn1 value")

    Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert told_expiry() is not None
    monkeypatch.setattr(tls, "_expires", fails)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert certificate.expires is None
    assert told_expiry() is None
    assert "error parsing asn1 value" in caplog.text


def test_a_certificate_of_an_unknown_version_is_served_without_its_expiry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issue(tmp_path, "first")
    file = tmp_path / "tls.crt"
    # The version is the first field of a certificate: 2 stands for the third.
    der = ssl.PEM_cert_to_DER_cert(file.read_text()).replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05", 1)
    file.write_text(ssl.DER_cert_to_PEM_cert(der))
    certificate = Certificate(file, tmp_path / "tls.key")
    assert (certificate.expires, told_expiry()) == (None, None)
    assert "nobody can tell when the certificate of the network's port expires" in caplog.text


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
