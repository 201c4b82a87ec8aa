# SPDX-License-Identifier: Apache-2.0
"""No secret leaves the cluster, wherever it stands."""

import base64
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from poc_operator.cli.redaction import REDACTED, Redactor, looks_secret
from poc_operator.fleets.history import RECORD
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

#: Each is put where its name says. Short ones, which no form betrays, are in places that are closed.
SECRETS = {
    "env": "hunter2",
    "env-long": "Zq8vN3kLw0Xy7Rt5Bm2Pc9Hd",
    "arg": "swordfish",
    "arg-flag": "correct-horse-battery",
    "arg-apart": "opensesame",
    "positional": "letmein99",
    "annotation": "topsecret1",
    "secret": "gateway-token-of-people",
    "secret-second": "gateway-token-before",
    "fleet-env": "fleetpassword",
    "fleet-arg": "fleetapikey",
    "log-bearer": "abc.def-ghi",
    "log-hex": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "log-url": "user:pa55word",
    "log-password": "winter2026",
    "log-hub": "hf_AbCdEfGhIjKlMnOp",
    "log-jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "event": "s3cr3t-in-event",
}


def _pod() -> dict[str, Any]:
    pod = seen.a_pod("demo-0")
    pod["metadata"]["annotations"] = {"example.org/note": SECRETS["annotation"]}
    box = pod["spec"]["containers"][0]
    box["env"] = [
        {"name": "DB_PASSWORD", "value": SECRETS["env"]},
        {"name": "ANYTHING", "value": SECRETS["env-long"]},
        {"name": "VLLM_POC_DRAIN_SECONDS", "value": "20"},
    ]
    box["args"] = [
        "vllm",
        SECRETS["positional"],
        f"--api-key={SECRETS['arg']}",
        f"--innocent={SECRETS['arg-flag']}",
        "--other",
        SECRETS["arg-apart"],
        "--max-model-len=8192",
        "--model=Qwen/Qwen3-30B-A3B-Instruct-2507",
    ]
    return pod


def _log() -> str:
    return f"""INFO round {seen.BLOCK} of {seen.KEY} starts, pod 6f1c2d3e-0000-4000-8000-123456789abc
> Authorization: Bearer {SECRETS["log-bearer"]}
digest {SECRETS["log-hex"]}
GET https://{SECRETS["log-url"]}@collector.example.org/poc
config: {{"password": "{SECRETS["log-password"]}"}}
using {SECRETS["log-hub"]} and {SECRETS["log-jwt"]}
the token is {SECRETS["secret"]}, before {SECRETS["secret-second"]}, the password {SECRETS["env"]}
as base64 {base64.b64encode(SECRETS["secret"].encode()).decode()}
"""


def _laid_down(api: ApiPaths) -> None:
    token = f"{SECRETS['secret']},{SECRETS['secret-second']}".encode()
    fleet = seen.a_fleet(
        env=[{"name": "PASSPHRASE", "value": SECRETS["fleet-env"]}], engineArgs=[f"--api-key={SECRETS['fleet-arg']}"]
    )
    fleet["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": json.dumps({"env": SECRETS["fleet-env"]}),
        RECORD: json.dumps(fleet["spec"]),
    }
    round_ = seen.a_round()
    api.answers |= {
        seen.PODS: [_pod()],
        seen.FLEETS: [fleet],
        seen.ROUNDS: [round_],
        "/api/v1/namespaces/poc/secrets": [{"data": {"token": base64.b64encode(token).decode()}}],
        f"{seen.PODS}/demo-0/log": _log(),
        seen.EVENTS: [seen.an_event("Failed", f"cannot log in: password={SECRETS['event']}")],
        f"{seen.API}/pocvalidations": [seen.a_validation()],
        f"{seen.API}/poccalibrations": [seen.a_calibration()],
    }


def _texts(file: Path) -> dict[str, str]:
    with tarfile.open(file) as tar:
        return {entry.name: tar.extractfile(entry).read().decode() for entry in tar}  # type: ignore[union-attr]


def test_an_archive_has_what_helps_and_no_secret(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    _laid_down(api)
    file = tmp_path / "bundle.tar.gz"
    done = run("bundle", "-f", str(file))
    assert done.code == 0, done.err
    texts = _texts(file)
    found = {(name, kind) for name, text in texts.items() for kind, value in SECRETS.items() if value in text}
    assert found == set()
    assert file.stat().st_mode & 0o077 == 0
    log = texts["poc-bundle/logs/poc/demo-0-vllm.log"]
    assert f"INFO round {seen.BLOCK} of {seen.KEY} starts, pod 6f1c2d3e-0000-4000-8000-123456789abc" in log
    pods = texts["poc-bundle/objects/pods.yaml"]
    for part in (
        "--max-model-len=8192",
        "--model=Qwen/Qwen3-30B-A3B-Instruct-2507",
        "--api-key=REDACTED",
        "DB_PASSWORD",
    ):
        assert part in pods, part
    assert "value: '20'" in pods
    assert seen.BLOCK in texts["poc-bundle/objects/pocrounds.yaml"]
    told = texts["poc-bundle/explanations.txt"]
    for subject in ("PoCRound poc/round-1", "PoCFleet poc/demo", "PoCValidation poc/v", "PoCCalibration poc/c"):
        assert subject in told, subject


def test_what_could_not_be_read_is_named(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    _laid_down(api)
    api.answers[f"{seen.PODS}/demo-0/log"] = (403, {"message": "pods/log is forbidden"})
    api.answers["/api/v1/namespaces/poc/secrets"] = (403, {"message": "secrets is forbidden"})
    file = tmp_path / "bundle.tar.gz"
    done = run("bundle", "-f", str(file))
    left = _texts(file)["poc-bundle/left-out.txt"]
    told = f"{len(left.splitlines())} things could not be read"
    assert (done.code, told in done.out) == (0, True)
    assert "logs/poc/demo-0-vllm.log: you lack a right" in left
    assert "secrets is forbidden" in left
    found = json.loads(run("bundle", "-f", str(file), "-o", "json").out)
    assert (found["file"], found["leftOut"]) == (str(file), left.splitlines())
    assert "check.json" in found["files"]


@pytest.mark.parametrize(
    ("word", "secret"),
    [
        ("Qwen3-30B-A3B-Instruct-2507", False),
        ("6f1c2d3e-0000-4000-8000-123456789abc", False),
        ("vllm-poc-operator-gateway", False),
        ("Zq8vN3kLw0Xy7Rt5Bm2Pc9Hd", True),
        ("d41d8cd98f00b204e9800998ecf8427e", True),
    ],
)
def test_words_that_look_made_at_random_are_secret(word: str, secret: bool) -> None:
    assert looks_secret(word) is secret


def test_names_of_secrets_and_images_stay() -> None:
    body = {
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "poc-token", "key": "token"}}}],
        "image": f"registry/worker@sha256:{'ab' * 32}",
        "data": {"password": "eA=="},
    }
    assert Redactor().body(body) == {**body, "data": {"password": REDACTED}}
