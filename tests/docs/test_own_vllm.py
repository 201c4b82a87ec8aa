# SPDX-License-Identifier: Apache-2.0
"""The snippets for charts of other projects: both flags, the token, and only fields that these charts have."""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.docs.pages import ROOT, Block, blocks
from vllm_poc.cli import EXTENSION_CLASS, MIDDLEWARE
from vllm_poc.server.admission import Access, Answered
from vllm_poc.server.errors import RefusalError
from vllm_poc.settings import Settings

PAGE = "own-vllm.md"
GATEWAY = "vllm-poc-operator-gateway.poc-system.svc"

#: The fields that a snippet has, after the chart's own file that reads them. A field that is not here must be looked up
#: there before a snippet may use it.
FIELDS = {
    # vllm-project/production-stack, helm/templates/deployment-vllm-multi.yaml and helm/README.md
    "production-stack-values.yaml": {
        f"servingEngineSpec.modelSpec.{name}"
        for name in (
            *("name", "repository", "tag", "modelURL", "replicaCount", "requestCPU", "requestMemory", "requestGPU"),
            *("vllmConfig.maxModelLen", "vllmConfig.extraArgs", "env"),
        )
    },
    # llm-d-incubation/llm-d-modelservice, charts/llm-d-modelservice/values.yaml
    "llm-d-values.yaml": {
        *("modelArtifacts.name", "modelArtifacts.uri", "modelArtifacts.size", "modelArtifacts.labels"),
        *("routing.servicePort", "routing.proxy.enabled", "prefill.create", "decode.replicas"),
        *(f"decode.containers.{name}" for name in ("name", "image", "modelCommand", "mountModelVolume", "args", "env")),
        "decode.containers.ports",
    },
    # kserve/kserve, docs of InferenceService v1beta1: a custom predictor is a pod's containers
    "kserve.yaml": {
        *("apiVersion", "kind", "metadata.name", "metadata.annotations"),
        *("spec.predictor.labels", "spec.predictor.minReplicas", "spec.predictor.maxReplicas"),
        *(f"spec.predictor.containers.{name}" for name in ("name", "image", "command", "args", "ports", "env")),
        "spec.predictor.containers.resources",
    },
}
#: What a chart or a sample of the project has the pods' labels from; the page's table names one of them.
LABELS = {
    "production-stack": "servingEngineSpec.modelSpec.0.name -> model",
    "KServe": "metadata.name -> serving.kserve.io/inferenceservice",
    "llm-d": "modelArtifacts.labels.llm-d.ai/model -> llm-d.ai/model",
    "AIBrix": "spec.template.metadata.labels.model.aibrix.ai/name -> model.aibrix.ai/name",
}
#: Fields whose inside is Kubernetes' own, or the reader's.
_OPAQUE = {"env", "args", "extraArgs", "labels", "annotations", "ports", "resources", "command"}


class Snippet(NamedTuple):
    """One file of the page, and its vLLM container as Kubernetes sees it."""

    title: str
    body: Any
    container: dict[str, Any]


def _block(title: str) -> Block:
    (found,) = [block for block in blocks() if block.page.name == PAGE and block.title == title]
    return found


def _snippet(title: str) -> Snippet:
    body = yaml.safe_load(_block(title).text)
    if title == "production-stack-values.yaml":
        (model,) = body["servingEngineSpec"]["modelSpec"]
        command = ["vllm", "serve", model["modelURL"], "--host", "0.0.0.0", "--port", "8000"]
        return Snippet(title, body, {"args": [*command, *model["vllmConfig"]["extraArgs"]], "env": model["env"]})
    if title == "llm-d-values.yaml":
        (container,) = body["decode"]["containers"]
        served = ["--port", str(body["routing"]["servicePort"]), "--served-model-name", body["modelArtifacts"]["name"]]
        return Snippet(title, body, {**container, "args": ["vllm", "serve", *served, *container["args"]]})
    pods = body["spec"]["predictor"] if title == "kserve.yaml" else body["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    return Snippet(title, body, container)


TITLES = [*FIELDS, "aibrix.yaml"]


@pytest.mark.parametrize("title", TITLES)
def test_a_snippet_has_both_flags(title: str) -> None:
    arguments = _snippet(title).container["args"]
    assert f"--worker-extension-cls={EXTENSION_CLASS}" in arguments
    assert f"--middleware={MIDDLEWARE}" in arguments
    # Two flags of vLLM do what this one does; vLLM itself does not know it.
    assert "--enable-poc" not in arguments


def test_the_table_has_both_flags() -> None:
    text = _block("kserve.yaml").page.read_text()
    rows = dict(re.findall(r"^ +\| `(--[\w-]+)` \| `([\w.]+)` \|$", text, re.MULTILINE))
    assert rows == {"--worker-extension-cls": EXTENSION_CLASS, "--middleware": MIDDLEWARE}


@pytest.mark.parametrize("title", TITLES)
def test_pods_answer_who_has_the_token_and_deliver_to_the_gateway(title: str) -> None:
    variables = {entry["name"]: entry for entry in _snippet(title).container["env"]}
    assert variables["VLLM_POC_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "poc-token", "key": "token"}}
    found = {name: entry.get("value", "from-a-secret") for name, entry in variables.items()}
    access = Access.decide(Settings.from_environment(found), None, {})
    assert access.answered is Answered.WITH_TOKEN
    assert access.allows_callback_to(GATEWAY)
    assert not access.allows_callback_to("example.org")


def _refusal(variables: dict[str, str]) -> str:
    """What a server with these settings answers somebody on another machine who has no token of it."""
    access = Access.decide(Settings.from_environment(variables), None, {})
    with pytest.raises(RefusalError) as refused:
        access.check({"type": "http", "client": ("10.0.0.1", 1), "server": ("10.0.0.2", 8000), "headers": []})
    return str(refused.value)


@pytest.mark.parametrize("variables", [{}, {"VLLM_POC_TOKEN": "another"}], ids=["no token", "another token"])
def test_the_page_knows_what_a_server_says_without_the_right_token(variables: dict[str, str]) -> None:
    page = (ROOT / "docs/start" / PAGE).read_text()
    said = re.findall(r"^\| `([^`]+)`[^|]*\| [^|]*`VLLM_POC_TOKEN`", page, re.MULTILINE)
    assert len([text for text in said if text in _refusal(variables)]) == 1


@pytest.mark.parametrize("title", FIELDS)
def test_a_snippet_uses_only_fields_that_were_looked_up(title: str) -> None:
    assert set(_paths(_snippet(title).body)) == FIELDS[title]


def _paths(body: Any, path: str = "") -> list[str]:  # noqa: ANN401 - any YAML
    if isinstance(body, list):
        return [found for item in body for found in _paths(item, path)]
    if not isinstance(body, dict) or path.rpartition(".")[2] in _OPAQUE:
        return [path]
    return [found for key, value in body.items() for found in _paths(value, f"{path}.{key}".lstrip("."))]


def _rows() -> dict[str, tuple[str, int]]:
    """The page's table: who starts the pods -> their label and port."""
    text = _block("aibrix.yaml").page.read_text()
    rows = re.findall(r"^\| ([\w-]+) \| `([^`]+)`[^|]*\| (\d+) \|$", text, re.MULTILINE)
    return {name: (label, int(port)) for name, label, port in rows}


@pytest.mark.parametrize("project", LABELS)
def test_the_table_names_label_and_port_of_the_pods(project: str) -> None:
    names = {"production-stack": TITLES[0], "llm-d": TITLES[1], "KServe": TITLES[2], "AIBrix": TITLES[3]}
    snippet = _snippet(names[project])
    source, _, label = LABELS[project].partition(" -> ")
    assert _rows()[project][0] == f"{label}: {_at(snippet.body, source)}"
    arguments = " ".join(snippet.container["args"]).replace("=", " ")
    assert re.findall(r"--port (\d+)", arguments) == [str(_rows()[project][1])]
    assert re.findall(r"--served-model-name (\S+)", arguments) == ["qwen3-8b"]


def _at(body: Any, path: str) -> str:  # noqa: ANN401 - any YAML
    """Return the value at a path; the rest of a path may itself be a key with dots."""
    while path:
        if isinstance(body, dict) and path in body:
            return str(body[path])
        key, _, path = path.partition(".")
        body = body[int(key)] if isinstance(body, list) else body[key]
    return str(body)


def _monitored() -> dict[str, tuple[Any, Any]]:
    """The labels of the pods and the containers' ports, of the snippets whose pods the chart's PodMonitor takes."""
    kserve, aibrix = _snippet("kserve.yaml"), _snippet("aibrix.yaml")
    own = next(yaml.safe_load_all((ROOT / "docs/examples/deployment.yaml").read_text()))["spec"]["template"]
    return {
        "KServe": (kserve.body["spec"]["predictor"]["labels"], kserve.container["ports"]),
        "AIBrix": (aibrix.body["spec"]["template"]["metadata"]["labels"], aibrix.container["ports"]),
        "Deployment": (own["metadata"]["labels"], own["spec"]["containers"][0]["ports"]),
    }


@pytest.mark.parametrize("project", ["KServe", "AIBrix", "Deployment"])
def test_the_charts_pod_monitor_takes_the_pods_of_a_snippet(project: str, helm: Path) -> None:
    command: list[str | Path] = [
        helm,
        "template",
        ROOT / "charts/vllm-poc-operator",
        "--set",
        "metrics.podMonitor.enabled=true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (monitor,) = [body for body in yaml.safe_load_all(done.stdout) if body and body["kind"] == "PodMonitor"]
    labels, ports = _monitored()[project]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert [port["containerPort"] for port in ports if port.get("name") == endpoint["port"]] == [_rows()[project][1]]


def test_the_monitor_of_llm_d_is_told_the_name_of_the_port() -> None:
    (port,) = _snippet("llm-d-values.yaml").container["ports"]
    assert port["containerPort"] == _rows()["llm-d"][1]
    assert f"`portName: {port['name']}`" in (ROOT / "docs/start" / PAGE).read_text()


def test_the_round_names_pods_of_a_snippet() -> None:
    spec = yaml.safe_load(_block("round.yaml").text)["spec"]
    ((key, value),) = spec["selector"]["matchLabels"].items()
    assert (f'{key}: "{value}"', spec["port"]) == _rows()["Deployment"]
