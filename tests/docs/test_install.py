# SPDX-License-Identifier: Apache-2.0
"""What the starts install fits together: helm renders its commands with its own values file, and the operator
makes of its fleet what it would make in a cluster.

A reader meets a mistake here in the first hour: a callback host that the pods refuse, a volume that nobody made.
"""

import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.fleets.render import render
from poc_operator.fleets.resolve import TOKEN_SECRET, Resolved, Surroundings, packaged, resolve
from tests.docs.pages import ROOT, Block, blocks
from vllm_poc.server.admission import Access, Answered
from vllm_poc.settings import Settings

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
    round_file: Path

    def workloads(self) -> list[tuple[str, dict[str, Any]]]:
        """The Deployments of the chart, and the StatefulSets that the operator makes."""
        return [found for found in self.objects if found[1]["kind"] in ("Deployment", "StatefulSet")]


def _page(name: str) -> list[Block]:
    return [block for block in blocks() if block.page.name == name]


#: The starts that install everything, with the place of their round.
PAGES = {"quick-start.md": "round.yaml", "laptop.md": "docs/examples/laptop/round.yaml"}


@pytest.fixture(params=PAGES)
def installation(request: pytest.FixtureRequest, helm: Path, tmp_path: Path) -> Installation:
    """Everything that a start installs, as helm renders it from the files that the page shows or names."""
    page = _page(request.param)
    for folder in ("charts", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    found = Installation(objects=[], created=set(), round_file=tmp_path / PAGES[request.param])
    for block in page:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        for command in block.commands:
            if command.startswith(_INSTALL):
                found.objects += _rendered(helm, tmp_path, command)
            found.created |= _created(command, tmp_path)
            found.objects += _of_fleets(command, tmp_path, found)
    return found


def _rendered(helm: Path, folder: Path, command: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of one ``helm upgrade --install``, each with its namespace."""
    words = command.removeprefix(_INSTALL).replace("--create-namespace", "").replace("--wait", "").split()
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
    applied = _applied(command, folder)
    return {Thing(namespace, body["kind"], body["metadata"]["name"]) for namespace, body in applied}


def _applied(command: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of the file that a kubectl command of the page applies, each with its namespace."""
    found = re.match(r"kubectl -n (\S+) apply -f (\S+)", command)
    return [] if not found else [(found[1], body) for body in yaml.safe_load_all((folder / found[2]).read_text())]


def _of_fleets(command: str, folder: Path, installed: Installation) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects that the operator makes of the fleets that a kubectl command applies."""
    found = []
    for namespace, body in _applied(command, folder):
        if body["kind"] != PoCFleet.KIND.kind:
            continue
        metadata = {"namespace": namespace, "uid": "uid", "generation": 1, "resourceVersion": "1"}
        metadata |= {"creationTimestamp": datetime.now(UTC), **body["metadata"]}
        fleet = PoCFleet.parse({**body, "metadata": metadata})
        around = Surroundings(
            presets=packaged(),
            image=_option(installed, "--worker-image"),
            token_secret=_option(installed, "--pod-token-secret", TOKEN_SECRET),
            gateway_host=_gateway_host(installed),
        )
        resolved = resolve(fleet.spec, around)
        assert isinstance(resolved, Resolved), resolved
        found += [(namespace, made) for made in render(fleet, resolved, around)]
    return found


def _option(installation: Installation, name: str, default: str | None = None) -> str:
    """Return the value of an option that the chart gives to the operator, or what the operator takes without it."""
    for _, body in installation.workloads():
        for argument in body["spec"]["template"]["spec"]["containers"][0].get("args", []):
            if argument.startswith(f"{name}="):
                return str(argument.partition("=")[2])
    if default is not None:
        return default
    pytest.fail(f"the page's operator has no {name}")


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
    if "secretName" in part and not part.get("optional"):
        found.add(Thing(namespace, "Secret", part["secretName"]))
    if "claimName" in part:
        found.add(Thing(namespace, "PersistentVolumeClaim", part["claimName"]))
    return found


def _gateway_host(installation: Installation) -> str:
    """Return the host of the address that the operator gives to pods."""
    return str(urlsplit(_option(installation, "--gateway-url")).hostname)


def _worker(installation: Installation) -> dict[str, Any]:
    (worker,) = [body for _, body in installation.workloads() if body["kind"] == "StatefulSet"]
    return worker


def _variables(body: dict[str, Any]) -> dict[str, str]:
    """Return the pod settings, those from Secrets with a value of our own."""
    (container,) = body["spec"]["template"]["spec"]["containers"]
    found = {entry["name"]: entry.get("value", "from-a-secret") for entry in container.get("env", [])}
    return {name: value for name, value in found.items() if name.startswith("VLLM_POC_")}


def test_pods_answer_the_operator_alone_and_deliver_to_the_gateway(installation: Installation) -> None:
    access = Access.decide(Settings.from_environment(_variables(_worker(installation))), None, {})
    assert access.answered is Answered.WITH_TOKEN
    assert access.callback_allow == (_gateway_host(installation),)


def test_everything_that_a_pod_names_is_made(installation: Installation) -> None:
    made = installation.created | {
        Thing(namespace, body["kind"], body["metadata"]["name"]) for namespace, body in installation.objects
    }
    needed = {thing for namespace, body in installation.workloads() for thing in _references(namespace, body)}
    # The operator makes this one for fleets where it does not exist.
    token = _option(installation, "--pod-token-secret", TOKEN_SECRET)
    needed -= {thing for thing in needed if thing.name == token == TOKEN_SECRET}
    assert needed - made == set()


def test_rounds_ask_for_the_model_that_the_pods_serve(installation: Installation) -> None:
    arguments = _worker(installation)["spec"]["template"]["spec"]["containers"][0]["args"]
    served = {argument.partition("=")[2] for argument in arguments if argument.startswith("--served-model-name=")}
    spec = yaml.safe_load(installation.round_file.read_text())["spec"]
    assert {spec["model"]["name"]} == served
    fleets = {thing.name for thing in installation.created if thing.kind == PoCFleet.KIND.kind}
    assert {spec["fleetRef"]["name"]} == fleets
