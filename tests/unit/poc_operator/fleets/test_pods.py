# SPDX-License-Identifier: Apache-2.0
"""The pods of a fleet: those of the example Deployment, open to whom the spec names, and with time to end."""

import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from poc_operator.apis.v1alpha1.meta import COMPONENT, FLEET_LABEL
from poc_operator.fleets.render import pod_template
from poc_operator.fleets.resolve import Resolved, Surroundings, resolve
from tests.docs.pages import ROOT
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from vllm_poc.server.admission import Access, Answered
from vllm_poc.settings import Settings

DEPLOYMENT = ROOT / "docs" / "examples" / "deployment.yaml"
#: The spec that says what the example Deployment says, and where it runs.
SPEC: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen3-8B"},
    "servedName": "qwen3-8b",
    "gpu": {"count": 1},
    "engineArgs": ["--max-model-len=8192"],
    "callbackAllow": ["vllm-poc-operator-gateway.poc-system.svc"],
}
PLACE = Surroundings(
    presets={},
    products=[],
    image="registry.example.org/poc/vllm-poc-worker:0.1.0",
    token_secret="poc-token",  # noqa: S106
)


def template_of(spec: dict[str, Any], around: Surroundings = AROUND) -> dict[str, Any]:
    """The template of the pods of a fleet."""
    fleet = a_fleet(**spec)
    resolved = resolve(fleet.spec, around)
    assert isinstance(resolved, Resolved)
    return pod_template(fleet, resolved, around)


def container(spec: dict[str, Any]) -> dict[str, Any]:
    """The container of the pods of a fleet."""
    (vllm,) = template_of(spec)["spec"]["containers"]
    found: dict[str, Any] = vllm
    return found


def normal(template: dict[str, Any]) -> dict[str, Any]:
    """The template without labels of its own, and with variables in order."""
    pod = json.loads(json.dumps(template["spec"]))
    pod["containers"][0]["env"].sort(key=lambda one: one["name"])
    labels = {name: value for name, value in template["metadata"]["labels"].items() if name.startswith("poc.gonka.ai/")}
    labels.pop(FLEET_LABEL, None)
    return {"labels": labels, "spec": pod}


def test_pods_without_a_fleet_are_shown_what_those_of_a_fleet_have() -> None:
    shown, service = yaml.safe_load_all(DEPLOYMENT.read_text())
    own = template_of(SPEC, PLACE)
    assert normal(shown["spec"]["template"]) == normal(own)
    assert own["metadata"]["labels"]["app.kubernetes.io/managed-by"] == COMPONENT
    labels = shown["spec"]["template"]["metadata"]["labels"].items()
    assert shown["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    # No pod more than the GPUs are for.
    assert shown["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize(
    ("spec", "answered"),
    [
        ({}, Answered.WITH_TOKEN),
        ({"callbackAllow": ["*.example.org"]}, Answered.WITH_TOKEN),
        ({"auth": {"open": True}, "callbackAllow": ["*"]}, Answered.EVERYBODY),
    ],
    ids=["token", "token and receivers", "open"],
)
def test_a_pod_answers_whom_the_spec_names(spec: dict[str, Any], answered: Answered) -> None:
    variables = {entry["name"]: entry.get("value", "from-a-secret") for entry in container(spec)["env"]}
    access = Access.decide(Settings.from_environment(variables), None, {})
    assert access.answered is answered
    assert access.allows_callback_to("collector.example.org")


@pytest.mark.parametrize("host", ["gateway.poc-system.svc", "fd00::7"])
def test_pods_deliver_to_the_gateway_alone_unless_the_fleet_says_otherwise(host: str) -> None:
    url = f"[{host}]" if ":" in host else host
    for spec, elsewhere in (({}, False), ({"callbackAllow": ["*.example.org"]}, True)):
        (vllm,) = template_of(spec, replace(AROUND, gateway_host=host))["spec"]["containers"]
        variables = {entry["name"]: entry.get("value", "from-a-secret") for entry in vllm["env"]}
        access = Access.decide(Settings.from_environment(variables), None, {})
        assert access.allows_callback_to("collector.example.org") is elsewhere
        assert access.allows_callback_to(str(urlsplit(f"http://{url}:8080/x").hostname)) is not elsewhere


def test_a_pod_has_time_to_end() -> None:
    (pause,) = container({})["lifecycle"]["preStop"]["exec"]["command"][1:]
    seconds = template_of({})["spec"]["terminationGracePeriodSeconds"]
    assert int(pause) + Settings().drain_seconds + 10 < seconds
