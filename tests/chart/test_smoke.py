# SPDX-License-Identifier: Apache-2.0
"""What `helm test` runs tells what is not served or does not answer, and has few rights."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import OPERATOR, SYSTEM_NAMESPACE
from tests.chart.rendered import Values, ensure, objects

pytestmark = pytest.mark.timeout(60, func_only=True)

KINDS = ["pocrounds", "pocvalidations", "poccalibrations", "pocfleets"]
GROUP = "/apis/poc.gonka.ai/v1alpha1"
PODS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
WELL: dict[str, tuple[int, str]] = {
    **{f"{GROUP}/{kind}": (200, '{"items": []}') for kind in KINDS},
    PODS: (200, '{"items": [{"status": {}}, {"status": {"podIP": "127.0.0.1"}}]}'),
    "/healthz": (200, "ok"),
    "/readyz": (200, "ok"),
}


@contextmanager
def served(answers: dict[str, tuple[int, str]]) -> Iterator[int]:
    """Serve these answers by path, as the API server, the operator and the gateway; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            status, body = answers.get(path, (404, ""))
            if path.startswith("/api") and self.headers["Authorization"] != "Bearer secret":
                status = 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - as the base has it
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def arguments(values: Values) -> list[str]:
    """Return the program of the rendered pod, with its arguments."""
    (pod,) = [body for body in objects(values) if body["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    found: list[str] = container["args"]
    return found


def run(folder: Path, answers: dict[str, tuple[int, str]], values: Values) -> subprocess.CompletedProcess[str]:
    """Run what the pod runs against these answers, once."""
    (folder / "token").write_text("secret\n")
    with served(answers) as port:
        address = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-c", *(one for one in arguments(values) if not one.startswith("--gateway-url"))]
        argv += [f"--gateway-url={address}"] if "gateway-url=" in "".join(arguments(values)[1:]) else []
        argv += [f"--api={address}", f"--health-port={port}", f"--account={folder}", "--seconds=0"]
        return subprocess.run(argv, capture_output=True, check=False, text=True, timeout=30)


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    ensure()


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        ({}, WELL),
        ({"gateway": {"enabled": False}}, {**WELL, "/readyz": (503, "")}),
        (
            {"watchNamespaces": ["poc"]},
            {path.replace(f"{GROUP}/", f"{GROUP}/namespaces/poc/"): answer for path, answer in WELL.items()},
        ),
    ],
    ids=["all namespaces", "no gateway", "one namespace"],
)
def test_all_is_well(tmp_path: Path, values: Values, answers: dict[str, tuple[int, str]]) -> None:
    done = run(tmp_path, answers, values)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        (f"{GROUP}/pocfleets", (404, ""), "does not serve pocfleets: install the CRDs, as crds.enabled does"),
        (f"{GROUP}/pocrounds", (403, ""), "the API server answers 403 for pocrounds"),
        (PODS, (403, ""), "the API server answers 403 for the operator's pods"),
        (PODS, (200, '{"items": []}'), "the operator answers nothing, as it has no pod with an address"),
        ("/healthz", (503, ""), "the operator answers 503: see its Deployment and the log of its pod"),
        ("/readyz", (503, ""), "the gateway answers 503 at"),
    ],
)
def test_it_tells_what_is_wrong_and_what_to_do(tmp_path: Path, path: str, answer: tuple[int, str], says: str) -> None:
    done = run(tmp_path, {**WELL, path: answer}, {})
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("namespaces", [[], ["poc", "default"]], ids=["cluster", "roles"])
def test_its_rights_are_its_own_and_few(namespaces: list[str]) -> None:
    found = [
        body
        for body in objects({"watchNamespaces": namespaces})
        if body["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"
    ]
    granted = [(rule["resources"], rule["verbs"]) for body in found for rule in body.get("rules", [])]
    assert sorted(granted) == sorted([(["pods"], ["list"])] + [(KINDS, ["list"])] * max(len(namespaces), 1))
    account = {"kind": "ServiceAccount", "name": f"fresh-{OPERATOR}-test", "namespace": SYSTEM_NAMESPACE}
    assert {tuple(one.items()) for body in found for one in body.get("subjects", [])} == {tuple(account.items())}


def test_the_operator_lets_the_test_in_and_nobody_else_to_its_health() -> None:
    bodies = objects({})
    (pod,) = [body for body in bodies if body["kind"] == "Pod"]
    policy = next(
        body for body in bodies if body["kind"] == "NetworkPolicy" and body["metadata"]["name"] == f"fresh-{OPERATOR}"
    )
    (health,) = [one for one in policy["spec"]["ingress"] if one["ports"] == [{"port": "health"}]]
    (peer,) = health["from"]
    assert peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    deployment = next(body for body in bodies if body["kind"] == "Deployment")
    assert not peer["podSelector"]["matchLabels"].items() <= deployment["metadata"]["labels"].items()


def test_the_program_is_that_of_the_chart() -> None:
    assert arguments({})[0].strip() == (OPERATOR_CHART / "files" / "smoke.py").read_text().strip()
