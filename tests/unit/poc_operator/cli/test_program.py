# SPDX-License-Identifier: Apache-2.0
"""The commands, from their words to what they print and to what they ask the cluster."""

import json
import re
import shlex
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from poc_operator.cli import VERSION, looking
from poc_operator.cli.cluster import REQUEST_SECONDS
from poc_operator.cli.program import app, guarded
from tests.docs.pages import ROOT
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

ALL_DELIVERED = {"checked": 420, "delivered": 420, "valid": 40, "rate": "100.0"}


def test_status_shows_fleets_rounds_slots_and_pods(run: Run) -> None:
    done = run("status")
    assert done.code == 0, done.err
    for part in (
        "demo",
        "2/2",
        "round-1",
        "40 %",
        "100.0/s",
        "1 of 2 pods",
        "6 s",
        "now, 12 s in all",
        "0/0",
        "node-1",
    ):
        assert part in done.out, part


def test_status_for_programs_has_the_same(run: Run) -> None:
    found = json.loads(run("status", "-o", "json").out)
    (row,) = found["rounds"]
    assert (row["share"], row["etaSeconds"], row["heldByChat"]) == (0.4, 6, 1)
    assert [slot["heldByChat"] for slot in row["slots"]] == [True, False]
    assert [slot["backlog"] for slot in row["slots"]] == [20, 0]
    assert [pod["round"] for pod in found["pods"]] == ["round-1 0/0", "round-1 1/0"]
    assert yaml.safe_load(run("status", "-o", "yaml").out)["fleets"][0]["ready"] == "2/2"


def test_status_says_which_pods_could_not_be_asked(run: Run, api: ApiPaths) -> None:
    api.answers[f"{seen.PODS}/demo-0:8000/proxy/metrics"] = (403, {"message": "no pods/proxy for you"})
    done = run("status")
    assert "note: 1 pod did not tell of chat, the first: demo-0" in done.out
    assert "no pods/proxy for you" in done.out
    api.asked.clear()
    assert "note" not in run("status", "--no-chat").out
    assert not [one for one in api.asked if "metrics" in one.path]


def test_a_watch_in_a_pipe_shows_each_look(run: Run, api: ApiPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(_: float) -> None:
        if sum(one.path == seen.ROUNDS for one in api.asked) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("poc_operator.cli.looking.time.sleep", pause)
    done = run("status", "-w")
    assert (done.code, done.out.count("Slots of round-1")) == (130, 2)
    assert "0.0/s" in done.out  # the slots' rates, known from the second look on
    assert run("status", "-w", "-o", "json").code == 2


def test_explain_names_what_is_wrong_and_what_to_do(run: Run, api: ApiPaths) -> None:
    waits = seen.condition("Progressing", "False", "NoPodReady", "waiting for one of 2 pods: demo-1 (ImagePullBackOff)")
    stuck = seen.a_pod(
        "demo-1", ready=False, waiting="ImagePullBackOff", says="Back-off: example/vllm-poc:2: not found"
    )
    api.answers[f"{seen.API}/pocrounds/round-1"] = seen.a_round(state="Pending", conditions=[waits], assignments=[])
    api.answers[seen.PODS] = [seen.a_pod("demo-0"), stuck]
    done = run("explain", "round-1")
    assert done.code == 0, done.err
    for part in (
        "NoPodReady: Waiting for one of 2 pods: demo-1 (ImagePullBackOff).",
        "What to do: Loading a model takes minutes.",
        "PodNotReady: Pod demo-1 is not ready (ImagePullBackOff: Back-off: example/vllm-poc:2: not found).",
        "WorkLost: node 0 group 0",
        "kubectl -n poc describe pod demo-1",
    ):
        assert part in done.out, part


def test_explain_takes_kinds_in_front_of_names(run: Run) -> None:
    assert run("explain", "fleet/demo").out.startswith("PoCFleet poc/demo\n")
    assert run("explain", "demo").out.startswith("PoCFleet poc/demo\n")
    assert run("explain", "pocr/round-1").out.startswith("PoCRound poc/round-1\n")
    done = run("explain", "moon/demo")
    assert (done.code, done.err) == (2, 'error: "moon" is no kind: use round, fleet, validation or calibration\n')


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "round-2"),
        ("round", "watch", "round-2", "-o", "json"),
        ("fleet", "rollout", "status", "demo-2"),
        ("status",),
    ],
)
def test_options_of_kubectl_stand_before_the_command_or_behind_it(
    run: Run, api: ApiPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    other = {path.replace("/poc/", "/other/"): answer for path, answer in seen.a_cluster().items()}
    rounds, fleets = (path.replace("/poc/", "/other/") for path in (seen.ROUNDS, seen.FLEETS))
    ended = seen.a_round("round-2", state="Complete", running=0)
    api.answers |= {**other, rounds: [ended], f"{rounds}/round-2": ended, f"{fleets}/demo-2": seen.a_fleet("demo-2")}
    monkeypatch.delenv("KUBECONFIG")
    options = ("-n", "other", "--kubeconfig", str(tmp_path / "config"), "--context", "test")
    before, behind = run(*options, *words), run(*words, *options)
    assert (before.code, behind.code) == (0, 0), before.err
    assert _ageless(before.out) == _ageless(behind.out)
    assert _ageless(run("-n", "moon", *words, *options).out) == _ageless(behind.out)  # behind the command it wins


def _ageless(told: str) -> str:
    """Return what was told without ages, which may grow by a second between two commands."""
    return re.sub(r'\d+ s\b|(?<=econds": )\d+', "an age", told)


def _printed() -> list[str]:
    """Return what stands behind ``kubectl poc`` wherever we print it, with x for what is filled in."""
    sources = [*ROOT.glob("operator/**/*.py"), *ROOT.glob("operator/**/*.js"), *ROOT.glob("hack/demo/*.py")]
    texts = [path.read_text() for path in [*sources, *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]]
    found = {words for text in texts for words in re.findall(r"kubectl poc ((?:-n \S+ )?[a-z-][^`\"'\n,;|:#(]*)", text)}
    return sorted({re.sub(r"\$?\{[^}]*\}", "x", words).strip() for words in found})


def test_each_command_that_we_print_is_taken(run: Run) -> None:
    printed = _printed()
    assert len(printed) > 25
    refused = {words: done.err for words in printed if (done := run(*shlex.split(words), "--help")).code}
    assert refused == {}


def test_errors_are_one_sentence_and_have_a_code(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    done = run("explain", "nothing")
    assert done.code == 4
    assert done.err.count("\n") == 1
    assert 'there is no round, fleet, validation or calibration "nothing" in the namespace "poc"' in done.err
    api.answers[seen.ROUNDS] = (403, {"message": "pocrounds is forbidden"})
    assert run("status").code == 5
    away = tmp_path / "away"
    away.write_text((tmp_path / "config").read_text().replace(api.url, "http://127.0.0.1:9"))
    done = run("status", "--kubeconfig", str(away))
    assert (done.code, done.err.startswith("error: the API server does not answer")) == (3, True)
    assert run("status", "--context", "moon").code == 1
    assert run("status", "--kubeconfig", "/nothing").err.startswith("error: --kubeconfig: there is no file")


def test_an_unexpected_error_shows_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyError("x")

    assert guarded(fail) == 1
    assert capsys.readouterr().err.startswith("error: this is a defect of the plugin (KeyError: 'x')")


@pytest.mark.parametrize(
    ("plural", "body"), [("pocvalidations", seen.a_validation("x")), ("poccalibrations", seen.a_calibration("x"))]
)
def test_a_bare_name_is_looked_for_in_all_kinds(run: Run, api: ApiPaths, plural: str, body: dict[str, Any]) -> None:
    api.answers[f"{seen.API}/{plural}/x"] = body
    done = run("explain", "x")
    assert (done.code, done.out.splitlines()[0]) == (0, f"{body['kind']} poc/x"), done.err


def test_explain_tells_what_keeps_results_in_the_gateway_or_out_of_it(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.a_gateway()
    told = {"receiver": "https://network:1/x", "backlog": 300, "last_error": "HTTP 502: Bad Gateway"}
    api.answers |= {
        f"{seen.GATEWAY}/health": {"status": "OK", "storage": "full"},
        f"{seen.GATEWAY}/rounds/poc/round-1/forwarding": told,
    }
    done = run("explain", "round-1")
    for part in (
        "StorageFull: The disk of the gateway poc-system/gateway is full.",
        "ReceiverFailing: The receiver https://network:1/x does not take results: HTTP 502: Bad Gateway.",
        "What to do: Look at the receiver's log",
        "kubectl -n poc-system get pvc",
        "kubectl poc -n poc round results round-1",
    ):
        assert part in done.out, part
    (asked,) = [one for one in api.asked if one.path.endswith("/forwarding")]
    assert asked.headers["x-poc-gateway-token"] == "people"
    known = seen.condition("Degraded", "True", "ReceiverFailing", "the receiver does not take results; 200 wait")
    api.answers[f"{seen.ROUNDS}/round-1"] = seen.a_round(conditions=[known], degraded="ReceiverFailing")
    assert run("explain", "round-1").out.count("ReceiverFailing") == 1, "what the gateway tells is newer"
    api.answers[f"{seen.GATEWAY}/health"] = (503, {"message": "no endpoints available"})
    assert "ReceiverFailing: The receiver does not take results; 200 wait." in run("explain", "round-1").out


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (f"{seen.GATEWAY}/health", (503, {"message": "no endpoints available"})),
        ("/api/v1/namespaces/poc-system/secrets/tokens", (403, {"message": "secrets is forbidden"})),
        (f"{seen.GATEWAY}/rounds/poc/round-1/forwarding", (404, {"reason": "RoundUnknown", "detail": "nothing yet"})),
        (f"{seen.GATEWAY}/rounds/poc/round-1/forwarding", {"receiver": "x", "backlog": 9, "last_error": None}),
    ],
)
def test_explain_goes_on_without_the_gateway(run: Run, api: ApiPaths, path: str, answer: Any) -> None:  # noqa: ANN401
    api.answers |= seen.a_gateway()
    told = {"receiver": None, "backlog": 0, "last_error": None}
    api.answers |= {
        f"{seen.GATEWAY}/health": {"status": "OK"},
        f"{seen.GATEWAY}/rounds/poc/round-1/forwarding": told,
        path: answer,
    }
    done = run("explain", "round-1", "-o", "json")
    assert done.code == 0
    reasons = {finding["reason"] for finding in json.loads(done.out)["findings"]}
    assert not reasons & {"StorageFull", "ReceiverFailing"}


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        pytest.param({"state": "Running"}, {}, True, id="it delivers there"),
        pytest.param({"state": "Running"}, (404, {"reason": "RoundUnknown"}), False, id="it delivers elsewhere"),
        pytest.param({"state": "Complete"}, {}, True, id="complete, and some were not delivered"),
        pytest.param({"state": "Complete", "totals": ALL_DELIVERED}, {}, False, id="complete, and all delivered"),
        pytest.param({"state": "Running", "totals": ALL_DELIVERED}, {}, True, id="all delivered, and more to come"),
    ],
)
def test_a_full_disk_is_told_of_rounds_that_it_keeps_from_delivering(
    run: Run,
    api: ApiPaths,
    status: dict[str, Any],
    answer: Any,  # noqa: ANN401
    *,
    told: bool,
) -> None:
    api.answers |= seen.a_gateway()
    known = {"receiver": None, "backlog": 0, "last_error": None}
    api.answers |= {
        f"{seen.API}/pocrounds/round-1": seen.a_round(**status),
        f"{seen.GATEWAY}/health": {"status": "OK", "storage": "full"},
        f"{seen.GATEWAY}/rounds/poc/round-1/forwarding": answer or known,
    }
    done = run("explain", "round-1", "-o", "json")
    assert ("StorageFull" in {finding["reason"] for finding in json.loads(done.out)["findings"]}) is told


@pytest.mark.parametrize("status", [{"state": "Complete"}, {"degraded": "ResultsConflict"}, {}])
def test_a_gateway_that_is_named_is_named_in_the_next_command(run: Run, api: ApiPaths, status: dict[str, Any]) -> None:
    api.answers |= seen.a_gateway()
    failing = {"receiver": "https://network:1/x", "backlog": 0 if status else 300, "last_error": "HTTP 502"}
    conditions = [seen.condition("Degraded", "True", "ResultsConflict", "differ")] if "degraded" in status else []
    api.answers |= {
        f"{seen.API}/pocrounds/round-1": seen.a_round(conditions=conditions, **status),
        f"{seen.GATEWAY}/health": {"status": "OK"},
        f"{seen.GATEWAY}/rounds/poc/round-1/forwarding": failing,
    }
    command = "kubectl poc -n poc round results round-1"
    assert command in json.loads(run("explain", "round-1", "-o", "json").out)["next"]
    option = ("--gateway", "poc-system/gateway")
    named = json.loads(run("explain", "round-1", *option, "-o", "json").out)["next"]
    assert (f"{command} --gateway poc-system/gateway" in named, command in named) == (True, False)


def test_explain_waits_for_the_gateway_only_so_long(run: Run, api: ApiPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "GATEWAY_SECONDS", 0.1)
    api.answers |= seen.a_gateway()
    api.held[f"{seen.GATEWAY}/health"] = threading.Event()
    began = time.monotonic()
    done = run("explain", "round-1")
    assert (done.code, "PoCRound poc/round-1" in done.out) == (0, True)
    assert time.monotonic() - began < REQUEST_SECONDS / 2


def test_a_gateway_that_is_named_and_cannot_be_asked_is_an_error(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.a_gateway()
    api.answers[f"{seen.GATEWAY}/health"] = (503, {"message": "no endpoints available"})
    done = run("explain", "round-1", "--gateway", "poc-system/gateway")
    assert (done.code, "the gateway poc-system/gateway cannot answer" in done.err) == (1, True)
    assert run("explain", "fleet/demo", "--gateway", "poc-system/gateway").code == 0


def test_results_come_through_the_proxy_with_the_token(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.a_gateway() | seen.stored_results()
    done = run("round", "results", "round-1")
    assert done.code == 0, done.err
    for part in (
        "400 results of 2 slots, 99.5/s",
        "last error: HTTP 503",
        "1.00000 to 2.00000  ████",
        "nonce 5: b and a",
    ):
        assert part in done.out, part
    asked = [one.headers["x-poc-gateway-token"] for one in api.asked if one.path.startswith(seen.GATEWAY)]
    assert asked == ["people"] * 4


def test_an_export_that_is_refused_leaves_no_file(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    api.answers |= seen.a_gateway()
    api.answers[f"{seen.GATEWAY}/rounds/poc/round-1/artifacts"] = '{"nonce": 1}\n'
    file = tmp_path / "results.jsonl"
    assert run("round", "export", "round-1", "-f", str(file), "--limit", "5").code == 0
    assert file.read_text() == '{"nonce": 1}\n'
    assert api.asked[-1].query == {"format": ["jsonl"], "limit": ["5"]}
    gone = tmp_path / "gone.jsonl"
    done = run("round", "export", "gone", "-f", str(gone))
    assert (done.code, list(tmp_path.glob("gone*"))) == (4, [])
    assert "has nothing of a round" in done.err


def test_an_export_whose_name_is_too_long_says_so(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    api.answers |= seen.a_gateway()
    api.answers[f"{seen.GATEWAY}/rounds/poc/round-1/artifacts"] = '{"nonce": 1}\n'
    file = tmp_path / ("x" * 300)
    done = run("round", "export", "round-1", "-f", str(file))
    assert done.code == 1
    assert done.err == f'error: --filename: "{file}" cannot be written (File name too long): name another file\n'


def test_several_gateways_have_to_be_told_apart(run: Run, api: ApiPaths) -> None:
    other = {**seen.a_service(), "metadata": {"name": "gateway", "namespace": "other"}}
    api.answers["/api/v1/services"] = [seen.a_service(), other]
    done = run("round", "results", "round-1")
    assert (done.code, "poc-system/gateway, other/gateway" in done.err) == (2, True)
    assert run("round", "results", "round-1", "--gateway", "x").code == 2
    api.answers["/api/v1/services"] = (403, {"message": "services is forbidden"})
    done = run("round", "results", "round-1")
    assert (done.code, "name the gateway with --gateway" in done.err) == (5, True)


def test_a_round_is_created_with_changes(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    manifest = tmp_path / "round.yaml"
    manifest.write_text(yaml.safe_dump({"kind": "PoCRound", "metadata": {"name": "a"}, "spec": {"blockHeight": 1}}))
    api.answers[f"POST {seen.ROUNDS}"] = (201, seen.a_round("b"))
    done = run(
        "round", "create", "-f", str(manifest), "--name", "b", "--block-height", "9", "--seconds", "60", "--dry-run"
    )
    assert (done.code, done.out) == (0, "pocround.poc.gonka.ai/b created (server dry run)\n")
    sent = api.asked[-1]
    assert (sent.query["dryRun"], sent.query["fieldValidation"]) == (["All"], ["Strict"])
    assert sent.body["metadata"]["name"] == "b"
    assert sent.body["spec"] == {"blockHeight": 9, "stop": {"afterSeconds": 60}}
    refused = {"message": 'PoCRound "b" is invalid: spec.nodes: Required value'}
    api.answers[f"POST {seen.ROUNDS}"] = (422, refused)
    done = run("round", "create", "-f", str(manifest))
    assert (done.code, "spec.nodes: Required value" in done.err) == (1, True)


def test_watch_ends_with_the_round_and_tells_its_failure(run: Run, api: ApiPaths) -> None:
    api.answers[f"{seen.API}/pocrounds/round-1"] = seen.a_round(state="Complete", running=0, message="done")
    assert run("round", "watch", "round-1").code == 0
    api.answers[f"{seen.API}/pocrounds/round-1"] = seen.a_round(state="Failed", running=0, message="lost")
    done = run("round", "watch", "round-1", "-o", "json")
    assert (done.code, json.loads(done.out)["state"]) == (1, "Failed")


@pytest.mark.parametrize(("state", "code"), [("Complete", 0), ("Failed", 1)])
def test_a_round_that_is_created_and_watched_is_one_document(
    run: Run, api: ApiPaths, tmp_path: Path, state: str, code: int
) -> None:
    manifest = tmp_path / "round.yaml"
    manifest.write_text(yaml.safe_dump(seen.a_round()))
    api.answers[f"POST {seen.ROUNDS}"] = (201, seen.a_round())
    api.answers[f"{seen.API}/pocrounds/round-1"] = seen.a_round(state=state, running=0)
    done = run("round", "create", "-f", str(manifest), "-o", "json", "-w")
    assert (done.code, json.loads(done.out)["state"]) == (code, state)
    assert yaml.safe_load(run("round", "create", "-f", str(manifest), "-o", "yaml", "-w").out)["state"] == state
    checked = json.loads(run("round", "create", "-f", str(manifest), "-o", "json", "-w", "--dry-run").out)
    assert checked["kind"] == "PoCRound"


#: Commands without ``--output``, with the reason.
NO_OUTPUT = {
    "completion": "what it writes is a program",
    "round export": "what it writes is for programs already: --format says how",
}


def _leaves(command: Any, words: str = "") -> Iterator[tuple[str, set[str]]]:  # noqa: ANN401 - Typer's own class
    """Return the commands that have none below, each with its options."""
    below = getattr(command, "commands", {})
    for name, one in below.items():
        yield from _leaves(one, f"{words} {name}".strip())
    if not below:
        yield words, {option for parameter in command.params for option in parameter.opts}


def test_every_command_writes_for_programs_too() -> None:
    leaves = dict(_leaves(typer.main.get_command(app)))
    assert {"status", "bundle", "fleet rollout undo"} <= set(leaves)
    assert {words for words, options in leaves.items() if "--output" not in options} == set(NO_OUTPUT)


def test_presets_need_no_cluster(run: Run, api: ApiPaths) -> None:
    found = json.loads(run("fleet", "presets", "-o", "json").out)
    assert "minimax-m2.7" in {preset["name"] for preset in found}
    assert "MiniMaxAI/MiniMax-M2.7" in run("fleet", "presets").out
    assert api.asked == []


def test_a_rollout_is_paused_and_resumed(run: Run, api: ApiPaths) -> None:
    api.answers[f"PATCH {seen.FLEETS}/demo"] = seen.a_fleet()
    assert run("fleet", "rollout", "pause", "demo").out == "pocfleet.poc.gonka.ai/demo paused\n"
    assert api.asked[-1].body == {"spec": {"update": {"paused": True}}}
    assert run("fleet", "rollout", "resume", "demo").code == 1  # it is not paused
    done = run("fleet", "rollout", "pause", "demo", "-o", "json")
    assert (done.code, json.loads(done.out)["metadata"]["name"]) == (0, "demo")


def test_a_rollout_that_has_stopped_is_waited_for_no_longer(run: Run, api: ApiPaths) -> None:
    update = {"phase": "Stopped", "message": "1 of 2 pods are updated; stopped, since demo-1 failed"}
    api.answers[f"{seen.FLEETS}/demo"] = seen.a_fleet(update=update)
    done = run("fleet", "rollout", "status", "demo", "-w")
    assert (done.code, "since demo-1 failed" in done.out) == (1, True)


def test_a_failed_rollout_says_why(run: Run, api: ApiPaths) -> None:
    failed = {"digest": "d", "revision": "demo-2", "message": "OOMKilled", "time": seen.START.isoformat()}
    update = {"phase": "Failed", "message": "back to demo-1", "failed": [failed]}
    api.answers[f"{seen.FLEETS}/demo"] = seen.a_fleet(update=update)
    done = run("fleet", "rollout", "status", "demo", "-w")
    assert (done.code, "demo-2" in done.out, "OOMKilled" in done.out) == (1, True, True)


def test_a_validation_of_a_round_takes_its_terms(run: Run, api: ApiPaths) -> None:
    verdict = {"total": 200, "mismatches": 90, "notComputed": 0, "pValue": "0.0", "fraud": True}
    found = {
        "metadata": seen.metadata("round-1-x"),
        "spec": {**_validation_spec(), "proofs": {"round": {"name": "round-1"}}},
        "status": {"state": "Complete", "verdict": verdict},
    }
    api.answers[f"POST {seen.API}/pocvalidations"] = (201, found)
    api.answers[f"{seen.API}/pocvalidations/round-1-x"] = found
    done = run("validate", "--round", "round-1", "--nonces", "50")
    assert (done.code, "fraud: 90 of 200 nonces mismatch, p-value 0.0" in done.out) == (1, True)
    (sent,) = [one.body for one in api.asked if one.method == "POST"]
    assert sent["spec"] == {**_validation_spec(), "proofs": {"round": {"name": "round-1", "nonces": 50}}}
    assert run("validate").code == 2


def test_a_validation_of_a_round_of_chains_takes_their_length(run: Run, api: ApiPaths) -> None:
    round_ = seen.a_round()
    round_["spec"] = {name: value for name, value in round_["spec"].items() if name != "artifact"}
    round_["spec"]["decode"] = {"maxTokens": 256}
    api.answers[f"{seen.API}/pocrounds/round-1"] = round_
    run("validate", "--round", "round-1", "--no-wait")
    (sent,) = [one.body for one in api.asked if one.method == "POST"]
    assert (sent["spec"]["decode"], "artifact" in sent["spec"]) == ({"maxTokens": 256}, False)


def _validation_spec() -> dict[str, object]:
    spec = seen.a_round()["spec"]
    return {field: spec[field] for field in ("blockHash", "blockHeight", "publicKey", "model", "fleetRef", "artifact")}


def test_a_calibration_tells_the_target(run: Run, api: ApiPaths) -> None:
    target = {"rTarget": "1.4", "low": "1.3", "high": "1.5", "validRate": "0.1", "theoryRate": "0.1", "nonces": 2000}
    spec = {field: value for field, value in _validation_spec().items() if field != "artifact"}
    found = {
        "metadata": seen.metadata("c"),
        "spec": {**spec, "validRate": "0.1"},
        "status": {"state": "Complete", "target": {**target, "agrees": True}},
    }
    api.answers[f"POST {seen.API}/poccalibrations"] = (201, found)
    api.answers[f"{seen.API}/poccalibrations/c"] = found
    done = run("calibrate", "--round", "round-1", "--name", "c")
    assert (done.code, "rTarget 1.4 (1.3 to 1.5)" in done.out) == (0, True), done.err


def test_the_version_is_that_of_the_distribution() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
