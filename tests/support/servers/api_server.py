# SPDX-License-Identifier: Apache-2.0
"""A kube-apiserver with etcd and nothing else: enough to see what it makes of CRDs and objects, within seconds."""

import http.client
import json
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hack.toolchain.tools import tool_path
from poc_operator.apis.v1alpha1.meta import API_VERSION
from tests.support.servers.http_server import free_port

_TOKEN = "administrator"  # noqa: S105 - of a server that lives for one test run, on the loopback interface
_START_SECONDS = 120.0
_LOG_LINES = 20


class ApiServer:
    """A running API server, as its administrator sees it.

    Each request has a connection of its own: the server closes one that was idle while other tests ran.
    """

    def __init__(self, port: int, authority: Path) -> None:
        self._port = port
        self._address = f"https://127.0.0.1:{port}"
        self._authority = authority
        self._trust = ssl.create_default_context(cafile=str(authority))

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        accept: str = "application/json",
        **query: str,
    ) -> tuple[int, Any]:
        """Return the status and the JSON of the answer."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": kind, "Accept": accept}
        sent = json.dumps(body) if body is not None else None
        server = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=30, context=self._trust)
        with closing(server) as connection:
            connection.request(method, f"{path}?{urlencode(query)}", sent, headers)
            answer = connection.getresponse()
            text = answer.read()
        return answer.status, json.loads(text) if text[:1] == b"{" else text.decode()

    def kubeconfig(self, token: str = _TOKEN) -> dict[str, Any]:
        """Return what a program needs to connect, as the administrator or with the token of another account."""
        cluster = {"server": self._address, "certificate-authority": str(self._authority)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
        }

    def create(self, kind: str, name: str, spec: Mapping[str, Any] | None, *, dry_run: bool = False) -> tuple[int, Any]:
        """Create an object of one of our kinds, or only ask whether it would be; unknown fields are refused."""
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        query = {"dryRun": "All"} if dry_run else {}
        sent = {key: value for key, value in body.items() if value is not None}
        return self.request("POST", _objects(kind), sent, fieldValidation="Strict", **query)

    def patch(self, kind: str, name: str, spec: Mapping[str, Any]) -> tuple[int, Any]:
        """Change fields of a spec; None takes one away."""
        return self.request("PATCH", f"{_objects(kind)}/{name}", {"spec": spec}, fieldValidation="Strict")

    def write_status(self, kind: str, name: str, status: Mapping[str, Any]) -> tuple[int, Any]:
        """Write fields of the status."""
        return self.request("PATCH", f"{_objects(kind)}/{name}/status", {"status": status})

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return what ``kubectl get -o wide`` shows of the objects, by column."""
        _, table = self.request("GET", _objects(kind), accept="application/json;as=Table;v=v1;g=meta.k8s.io")
        columns = [column["name"] for column in table["columnDefinitions"]]
        return [dict(zip(columns, row["cells"], strict=True)) for row in table["rows"]]

    def install(self, crd: Mapping[str, Any]) -> None:
        """Create a CRD, or replace it, and wait until it is served."""
        name = crd["metadata"]["name"]
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        status, answer = self.request("POST", path, crd)
        if status != HTTPStatus.CREATED:
            raise AssertionError(f"the API server refuses the CRD {name}: {answer}")
        _until(lambda: self._is_established(f"{path}/{name}"), f"CRD {name} is served")

    def _is_established(self, path: str) -> bool:
        conditions = self.request("GET", path)[1].get("status", {}).get("conditions")
        return any(found["type"] == "Established" and found["status"] == "True" for found in conditions or ())


def _objects(kind: str) -> str:
    return f"/apis/{API_VERSION}/namespaces/default/{kind.lower()}s"


@contextmanager
def api_server(account: str | None = None) -> Iterator[ApiServer]:
    """Run an API server on free ports of the loopback interface.

    With ``account``, `NAMESPACE:NAME` of a service account, it has the rights that roles give it, and its own name as
    token. Without it everybody may do everything.
    """
    with tempfile.TemporaryDirectory(prefix="poc-api-server-") as folder:
        home = Path(folder)
        rows = [f"{_TOKEN},{_TOKEN},{_TOKEN},system:masters"]
        rows += [f"{account},system:serviceaccount:{account},account"] if account is not None else []
        (home / "tokens.csv").write_text("".join(f"{row}\n" for row in rows))
        mode = "AlwaysAllow" if account is None else "RBAC"
        etcd, peer, port = (free_port() for _ in range(3))
        with _running(home, "etcd", _etcd(home, etcd, peer)):
            subprocess.run(["openssl", "genrsa", "-out", home / "account.key"], check=True, capture_output=True)
            with _running(home, "kube-apiserver", _kube_apiserver(home, port, etcd, mode)) as process:
                yield _ready(home, port, process)


def _etcd(home: Path, port: int, peer: int) -> list[str]:
    client, others = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    return [
        f"--data-dir={home / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={others}",
        f"--initial-advertise-peer-urls={others}",
        f"--initial-cluster=default={others}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _kube_apiserver(home: Path, port: int, etcd: int, mode: str) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={home / 'certificates'}",
        f"--token-auth-file={home / 'tokens.csv'}",
        f"--authorization-mode={mode}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={home / 'account.key'}",
        f"--service-account-signing-key-file={home / 'account.key'}",
        "--disable-admission-plugins=ServiceAccount",
    ]


def _ready(home: Path, port: int, process: "subprocess.Popen[bytes]") -> ApiServer:
    certificate = home / "certificates" / "apiserver.crt"

    def is_ready() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"kube-apiserver ended: {_tail(home / 'kube-apiserver.log')}")
        try:
            return certificate.exists() and ApiServer(port, certificate).request("GET", "/readyz")[0] == HTTPStatus.OK
        except OSError:
            return False

    _until(is_ready, "kube-apiserver is ready")
    return ApiServer(port, certificate)


@contextmanager
def _running(home: Path, name: str, flags: list[str]) -> "Iterator[subprocess.Popen[bytes]]":
    with (home / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([tool_path(name), *flags], stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)


def _until(holds: Any, what: str) -> None:  # noqa: ANN401 - any callable
    end = time.monotonic() + _START_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"not within {_START_SECONDS:.0f} s: {what}")
        time.sleep(0.2)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
