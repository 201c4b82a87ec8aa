# SPDX-License-Identifier: Apache-2.0
"""What every command says where the cluster or the kubeconfig is not as it should be: one sentence, with the remedy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Done, Run

COMMANDS = (
    ("status",),
    ("explain", "round-1"),
    ("explain", "fleet/demo"),
    ("round", "create", "-f", "round.yaml"),
    ("round", "watch", "round-1"),
    ("round", "results", "round-1"),
    ("round", "export", "round-1"),
    ("fleet", "presets", "--from-cluster"),
    ("fleet", "rollout", "status", "demo"),
    ("fleet", "rollout", "pause", "demo"),
    ("fleet", "rollout", "history", "demo"),
    ("fleet", "rollout", "undo", "demo"),
    ("validate", "--round", "round-1"),
    ("calibrate", "--round", "round-1"),
    ("check",),
    ("bundle", "-f", "bundle.tar.gz"),
)
#: These ask for what the cluster has without our CRDs, or tell in their own words what is missing.
OF_OUR_KINDS = [words for words in COMMANDS if words[1:2] not in {("results",), ("export",), ("presets",)}][:-2]
NO_PATH = (404, "404 page not found\n")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "round.yaml").write_text(yaml.safe_dump(seen.a_round()))


def _sentence(done: Done, code: int) -> str:
    """Return the only line of an error, without what only a programmer reads."""
    assert (done.code, done.err.count("\n"), done.out) == (code, 1, ""), done
    assert done.err.startswith("error: ")
    assert not [word for word in ("Traceback", "defect", "Errno") if word in done.err], done.err
    assert ": " in done.err.removeprefix("error: ")  # what is wrong, and what to do
    return done.err


def _changed(api: ApiPaths, file: Path, user: Mapping[str, Any] | None = None, **cluster: str) -> str:
    """Write a kubeconfig with another user or cluster; return its path."""
    body = yaml.safe_load(api.kubeconfig(file).read_text())
    body["clusters"][0]["cluster"] |= cluster
    body["users"][0]["user"] = {"token": "t"} if user is None else dict(user)
    file.write_text(yaml.safe_dump(body))
    return str(file)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_api_server_that_is_away_is_named(run: Run, api: ApiPaths, tmp_path: Path, words: tuple[str, ...]) -> None:
    file = _changed(api, tmp_path / "away", server="http://127.0.0.1:9")
    told = _sentence(run(*words, "--kubeconfig", file), 3)
    assert "the API server does not answer (http://127.0.0.1:9: Connection refused): check the context" in told
    assert not (tmp_path / "bundle.tar.gz").exists()


@pytest.mark.parametrize("words", OF_OUR_KINDS, ids=" ".join)
def test_a_cluster_without_our_kinds_is_told_from_one_without_the_object(
    run: Run, api: ApiPaths, words: tuple[str, ...]
) -> None:
    for path in [*api.answers]:
        if path.startswith(seen.API):
            del api.answers[path]
    for plural in ("pocrounds", "pocfleets"):
        for end in ("", "/round-1", "/demo"):
            api.answers[f"{seen.API}/{plural}{end}"] = NO_PATH
    kind = "pocfleets" if "fleet" in words[0] or "fleet/" in words[-1] or words == ("status",) else "pocrounds"
    told = _sentence(run(*words), 4)
    assert "the cluster has no poc" in told
    assert ": install the operator's chart, or use another context" in told
    assert kind in told or words == ("status",)


def test_an_unknown_object_and_an_unknown_namespace_are_named(run: Run, api: ApiPaths) -> None:
    missing = 'there is no round, fleet, validation or calibration "moon" in the namespace "poc": look with'
    assert missing in _sentence(run("explain", "moon"), 4)
    assert 'there is no PoCFleet "moon"' in _sentence(run("explain", "fleet/moon"), 4)
    api.answers[f"POST {seen.API}/pocrounds"] = (404, {"message": 'namespaces "poc" not found'})
    told = _sentence(run("round", "create", "-f", "round.yaml"), 4)
    assert told == 'error: namespaces "poc" not found: create it, or use another --namespace\n'


#: These look for something in the namespace, and would find nothing.
IN_A_NAMESPACE = [
    words for words in COMMANDS if words[1:2] not in {("create",), ("results",), ("export",), ("presets",)}
]


@pytest.mark.parametrize("words", IN_A_NAMESPACE, ids=" ".join)
def test_a_namespace_that_is_missing_is_named(run: Run, api: ApiPaths, words: tuple[str, ...]) -> None:
    for plural in ("pocrounds", "pocfleets"):
        api.answers[f"/apis/poc.gonka.ai/v1alpha1/namespaces/moon/{plural}"] = []
    api.answers["/api/v1/namespaces/moon/pods"] = []
    told = 'there is no namespace "moon": use another --namespace; `kubectl get namespaces` lists those that there are'
    assert told in _sentence(run("-n", "moon", *words), 4)
    assert not Path("bundle.tar.gz").exists()


def test_a_namespace_that_is_empty_or_may_not_be_read_is_just_empty(run: Run, api: ApiPaths) -> None:
    for plural in ("pocrounds", "pocfleets"):
        api.answers[f"/apis/poc.gonka.ai/v1alpha1/namespaces/moon/{plural}"] = []
    api.answers["/api/v1/namespaces/moon/pods"] = []
    for answer in ({"metadata": {"name": "moon"}}, (403, {"message": "no"})):
        api.answers["/api/v1/namespaces/moon"] = answer
        assert run("-n", "moon", "status").code == 0
        missing = _sentence(run("-n", "moon", "explain", "fleet/demo"), 4)
        assert 'there is no PoCFleet "demo" in the namespace "moon"' in missing
    del api.answers["/api/v1/namespaces/moon"]
    assert run("-A", "-n", "moon", "status").code == 2, "-A stands behind the command"
    api.answers |= {f"/apis/poc.gonka.ai/v1alpha1/{plural}": [] for plural in ("pocrounds", "pocfleets")}
    api.answers["/api/v1/pods"] = []
    assert run("status", "-A", "-n", "moon").code == 0


@pytest.mark.parametrize(
    ("status", "answer", "code", "told"),
    [
        (401, {"message": "Unauthorized"}, 5, "the API server does not know you (Unauthorized): log in again"),
        (403, {"message": "no"}, 5, "you lack a right (no): ask for it, or use another context"),
        (409, {"message": '"round-1" exists'}, 1, '"round-1" exists: use another name, or delete that one first'),
        (422, {"message": "spec.x: no"}, 1, "the API server refused it (spec.x: no): correct what it names"),
        (429, {"message": "busy"}, 1, "the API server cannot answer (busy): try again in a while"),
        (500, {"message": "etcd"}, 1, "the API server cannot answer (etcd): try again in a while"),
        (200, "<p>Log in</p>", 3, "the answer is no JSON (<p>Log in</p>): check that the context's server is an API"),
    ],
)
def test_an_answer_that_refuses_names_the_remedy(
    run: Run,
    api: ApiPaths,
    status: int,
    answer: object,
    code: int,
    told: str,
) -> None:
    api.answers[f"POST {seen.API}/pocrounds"] = (status, answer)
    assert told in _sentence(run("round", "create", "-f", "round.yaml"), code)


def test_a_gateway_that_does_not_take_the_token_names_the_variable(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.a_gateway()
    api.answers[f"{seen.GATEWAY}/rounds/poc/round-1/summary"] = (401, {"detail": "no such token"})
    told = _sentence(run("round", "results", "round-1"), 5)
    assert "the gateway poc-system/gateway does not take the token" in told
    assert "POC_GATEWAY_TOKEN" in told


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a: [", "while parsing a flow node"),
        (b"hello", "it has something that the plugin does not understand"),
        (b"[]", "it has something that the plugin does not understand"),
        (b"\xff\x00\x89", "it has something that the plugin does not understand"),
        (b"", "file is empty"),
    ],
)
def test_a_kubeconfig_that_is_none_is_named(run: Run, tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "broken").write_bytes(content)
    told = _sentence(run("status", "--kubeconfig", str(tmp_path / "broken")), 1)
    assert f'the kubeconfig "{tmp_path / "broken"}" cannot be used (' in told
    assert f"{why}" in told
    assert told.endswith("): correct it, or set KUBECONFIG, --kubeconfig or --context\n")


def test_a_kubeconfig_that_is_a_folder_or_missing_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "missing", "No configuration found")):
        monkeypatch.setenv("KUBECONFIG", str(path))
        assert f'the kubeconfig "{path}" cannot be used ({why}' in _sentence(run("status"), 1)


@pytest.mark.parametrize("server", ["127.0.0.1:9", "http://127.0.0.1:99999", "ftp://x"])
def test_a_server_that_is_no_url_is_named(run: Run, api: ApiPaths, tmp_path: Path, server: str) -> None:
    told = _sentence(run("status", "--kubeconfig", _changed(api, tmp_path / "odd", server=server)), 1)
    assert f'the server "{server}" of the kubeconfig is no URL: write it as in https://HOST:PORT' in told


def test_a_connection_that_is_not_secure_is_told_from_none(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    plain = api.url.replace("http:", "https:")
    told = _sentence(run("status", "--kubeconfig", _changed(api, tmp_path / "tls", server=plain)), 3)
    assert f"there is no secure connection to the API server ({plain}: wrong version number): " in told
    assert "check the server and its certificate-authority" in told


@pytest.mark.parametrize(("command", "why"), [("no-such-helper", "No such file or directory"), ("false", "returned 1")])
def test_a_login_helper_that_fails_is_named(run: Run, api: ApiPaths, tmp_path: Path, command: str, why: str) -> None:
    helper = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "interactiveMode": "Never"}
    file = _changed(api, tmp_path / "helper", {"exec": helper})
    told = _sentence(run("status", "--kubeconfig", file), 5)
    assert "the kubeconfig's user cannot log in (" in told
    assert why in told
    assert api.asked == []


def test_what_is_secret_in_a_kubeconfig_is_not_told(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    provider = {"auth-provider": {"name": "oidc", "config": {"client-secret": "sesame"}}}
    told = _sentence(run("status", "--kubeconfig", _changed(api, tmp_path / "oidc", provider)), 1)
    assert "sesame" not in told


def test_a_manifest_that_is_missing_or_no_text_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    for name, why in (("nowhere", "No such file or directory"), ("binary", "it is no text")):
        told = _sentence(run("round", "create", "-f", name), 1)
        assert f'--filename: "{name}" cannot be read ({why}): name a file with a manifest' in told
