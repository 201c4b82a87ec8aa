# SPDX-License-Identifier: Apache-2.0
"""What the quick start installs fits together: helm renders its commands with its own values files.

A reader meets a mistake here in the first hour: a callback host that the pods refuse, a volume that nobody made.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.docs.pages import ROOT, Block, blocks
from vllm_poc.server.admission import Access, Answered
from vllm_poc.server.settings import Settings

pytestmark = pytest.mark.timeout(120, func_only=True)

LIMIT = 60
_INSTALL = "helm upgrade --install "
_NAMED = {"secretKeyRef": "Secret", "secretRef": "Secret", "configMap": "ConfigMap", "configMapKeyRef": "ConfigMap"}


@dataclass(frozen=True)
class Thing:
    """An object that something refers to."""

    namespace: str
    kind: str
    name: str


@dataclass
class Installation:
    """What the commands of one page bring into a cluster."""

    objects: list[tuple[str, dict[str, Any]]]
    created: set[Thing]

    def deployments(self) -> list[tuple[str, dict[str, Any]]]:
        return [(namespace, body) for namespace, body in self.objects if body["kind"] == "Deployment"]


def _page(name: str) -> list[Block]:
    return [block for block in blocks() if block.page.name == name]


@pytest.fixture
def installation(helm: Path, tmp_path: Path) -> Installation:
    """Everything that the quick start installs, as helm renders it from the files that the page shows."""
    page = _page("quick-start.md")
    for folder in ("charts", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    found = Installation(objects=[], created=set())
    for block in page:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        for command in block.commands:
            if command.startswith(_INSTALL):
                found.objects += _rendered(helm, tmp_path, command)
            found.created |= _created(command, tmp_path)
    return found


def _rendered(helm: Path, folder: Path, command: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of one ``helm upgrade --install``, each with its namespace."""
    words = command.removeprefix(_INSTALL).replace("--create-namespace", "").split()
    namespace = words[words.index("--namespace") + 1]
    done = subprocess.run(
        [helm, "template", *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    bodies = [body for body in yaml.safe_load_all(done.stdout) if body]
    return [(body["metadata"].get("namespace", namespace), body) for body in bodies]


def _created(command: str, folder: Path) -> set[Thing]:
    """Return what a kubectl command of the page makes."""
    secret = re.match(r"kubectl -n (\S+) create secret generic (\S+)", command)
    if secret:
        return {Thing(secret[1], "Secret", secret[2])}
    applied = re.match(r"kubectl -n (\S+) apply -f (\S+)", command)
    if not applied:
        return set()
    bodies = yaml.safe_load_all((folder / applied[2]).read_text())
    return {Thing(applied[1], body["kind"], body["metadata"]["name"]) for body in bodies}


def _references(namespace: str, part: Any) -> set[Thing]:  # noqa: ANN401 - any part of a manifest
    """Return the Secrets, ConfigMaps and PVCs that a pod template names and does not call optional."""
    if isinstance(part, list):
        return {thing for item in part for thing in _references(namespace, item)}
    if not isinstance(part, dict):
        return set()
    found = {thing for value in part.values() for thing in _references(namespace, value)}
    for key, kind in _NAMED.items():
        if isinstance(part.get(key), dict) and not part[key].get("optional"):
            found.add(Thing(namespace, kind, part[key]["name"]))
    if "claimName" in part:
        found.add(Thing(namespace, "PersistentVolumeClaim", part["claimName"]))
    return found


def _gateway_host(installation: Installation) -> str:
    """Return the host of the address that the operator gives to pods."""
    for _, body in installation.deployments():
        for argument in body["spec"]["template"]["spec"]["containers"][0].get("args", []):
            if argument.startswith("--gateway-url="):
                return str(urlsplit(argument.partition("=")[2]).hostname)
    pytest.fail("the quick start installs no gateway")


def _worker(installation: Installation) -> dict[str, Any]:
    labels = [body["spec"]["template"]["metadata"]["labels"] for _, body in installation.deployments()]
    workers = [label.get("poc.gonka.ai/worker") == "true" for label in labels]
    return installation.deployments()[workers.index(True)][1]


def _variables(body: dict[str, Any]) -> dict[str, str]:
    """Return the pod settings, those from Secrets with a value of our own."""
    (container,) = body["spec"]["template"]["spec"]["containers"]
    found = {entry["name"]: entry.get("value", "from-a-secret") for entry in container.get("env", [])}
    return {name: value for name, value in found.items() if name.startswith("VLLM_POC_")}


def test_pods_answer_the_operator_alone_and_deliver_to_the_gateway(installation: Installation) -> None:
    access = Access.decide(Settings.from_environment(_variables(_worker(installation))), None, {})
    assert access.answered is Answered.WITH_TOKEN
    host = _gateway_host(installation)
    assert access.allows_callback_to(host), f"{access.callback_allow} refuses the gateway's own address {host}"


def test_everything_that_a_pod_names_is_made(installation: Installation) -> None:
    made = installation.created | {
        Thing(namespace, body["kind"], body["metadata"]["name"]) for namespace, body in installation.objects
    }
    needed = {thing for namespace, body in installation.deployments() for thing in _references(namespace, body)}
    assert needed - made == set()


def test_rounds_ask_for_the_model_that_the_pods_serve(installation: Installation) -> None:
    arguments = _worker(installation)["spec"]["template"]["spec"]["containers"][0]["args"]
    served = {argument.partition("=")[2] for argument in arguments if argument.startswith("--served-model-name=")}
    rounds = [yaml.safe_load(block.text) for block in _page("quick-start.md") if block.title == "round.yaml"]
    assert {body["spec"]["model"]["name"] for body in rounds} == served
