# SPDX-License-Identifier: Apache-2.0
"""LeaderWorkerSet's own controller and webhooks, as a process beside an API server of this machine."""

import base64
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hack.toolchain.tools import LWS, ensure_tools, source_folder, tool_path
from tests.support.servers.http_server import free_port

Body = dict[str, Any]


@contextmanager
def leader_worker_set(folder: Path, kubeconfig: Path, create: Callable[[Body], object]) -> Iterator[None]:
    """Run the controller, whose logs are in ``folder``. ``create`` makes its CRDs and webhooks, and they stay."""
    ensure_tools([LWS])
    for body in custom_resources():
        create(body)
    port, health = free_port(), free_port()
    authority = _make_certificate(folder)
    settings = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"port": port, "host": "127.0.0.1", "certDir": str(folder)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
    }
    (folder / "lws.yaml").write_text(yaml.safe_dump(settings))
    with program(folder, "leaderworkerset", f"--config={folder / 'lws.yaml'}", KUBECONFIG=str(kubeconfig)):
        _wait_for_port(port)
        for body in webhooks(port, authority):
            create(body)
        yield


@contextmanager
def program(folder: Path, name: str, *flags: str, **environment: str) -> Iterator[None]:
    """Run one of Kubernetes' programs, which must not end meanwhile."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [tool_path(name), *flags], stdout=log, stderr=log, env={**os.environ, **environment}, cwd=folder
        )
    try:
        yield
        assert process.poll() is None, (folder / f"{name}.log").read_text()[-2000:]
    finally:
        process.terminate()
        process.wait(timeout=30)


def custom_resources() -> Iterator[Body]:
    """Return LeaderWorkerSet's CRDs."""
    for file in sorted((source_folder(LWS) / "config/crd/bases").iterdir()):
        yield yaml.load(file.read_text(), yaml.CSafeLoader)


def webhooks(port: int, authority: str = "") -> Iterator[Body]:
    """Return its webhooks, for a server on this machine. ``authority`` is the certificate in base64."""
    for body in yaml.safe_load_all((source_folder(LWS) / "config/webhook/manifests.yaml").read_text()):
        for webhook in body["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
        yield body


def _make_certificate(folder: Path) -> str:
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return base64.b64encode((folder / "tls.crt").read_bytes()).decode()


def _wait_for_port(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < end, "LeaderWorkerSet's webhooks do not listen"
            time.sleep(0.2)
        else:
            return
