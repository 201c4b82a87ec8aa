# SPDX-License-Identifier: Apache-2.0
"""What a fleet's status says of its pods, whom it asks for a self-check, and whom it bars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import CheckResult, Fingerprint, FleetPod
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.validation import StatTest
from poc_operator.fleets.checked_pods import CheckAnswer, CheckedPods, check_pods, finding, with_bars
from poc_operator.fleets.resolve import GoldenVectors, PresetError, Resolved, parse_preset
from poc_operator.fleets.self_check import Check, Vectors, packed
from poc_operator.observed import Container, PodView, served_model
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import a_fleet
from tests.unit.poc_operator.fleets.test_self_check import engine

RESOLVED = Resolved(model="org/model")
CHECK = "org/model seqLen=256 kDim=12 nonces=32"
DAY = timedelta(days=1)

Answers = Mapping[str, CheckAnswer]


def fleet_of(found: CheckedPods | None = None, **self_check: Any) -> PoCFleet:  # noqa: ANN401
    """A fleet with self-checks whose status says what was found."""
    fleet = a_fleet(selfCheck=self_check)
    return fleet if found is None else after(fleet, found)


def after(fleet: PoCFleet, found: CheckedPods) -> PoCFleet:
    status = fleet.status.model_copy(update={"pods": list(found.pods), "self_check_references": list(found.references)})
    return PoCFleet.parse({**fleet.model_dump(mode="json", by_alias=True), "status": status.stored()})


def a_pod(number: int, *, starts: int = 0, ready: bool = True, model: str = "org/model", **fields: Any) -> PodView:  # noqa: ANN401
    server = Container(id=f"c{number}#{starts}", ports=frozenset({8000}), model=model)
    return PodView(
        name=f"demo-{number}",
        namespace="ns",
        uid=f"u{number}",
        labels={FLEET_LABEL: "demo", "controller-revision-hash": "r1"},
        ready=ready,
        **{"ip": "10.0.0.1", "containers": (server,), **fields},
    )


def an_answer(
    pod: PodView,
    vectors: Vectors | None,
    *,
    at: datetime = NOW,
    check: str = CHECK,
    **fields: Any,  # noqa: ANN401
) -> CheckAnswer:
    return CheckAnswer(server=pod.server(8000), check=check, time=at, vectors=vectors, **fields)


def results(found: CheckedPods) -> dict[str, str]:
    return {pod.name: str(pod.result) for pod in found.pods}


def asked(found: CheckedPods) -> list[str]:
    return [ask.pod.name for ask in found.asks]


def message(found: CheckedPods, number: int = 0) -> str:
    return found.pods[number].message


def test_a_ready_pod_is_asked_and_passes() -> None:
    pod = a_pod(0)
    found = check_pods(fleet_of(), RESOLVED, [pod], {}, NOW)
    assert (asked(found), results(found)) == (["demo-0"], {"demo-0": "Pending"})
    assert message(found) == "the pod computes its nonces"
    assert (found.asks[0].check.name, found.asks[0].server, found.asks[0].port) == (CHECK, "c0#0", 8000)

    print_ = Fingerprint(gpu="1 × H200", attention="FLASH_ATTN")  # noqa: RUF001
    answers = {"u0": an_answer(pod, engine(1), fingerprint=print_)}
    found = check_pods(fleet_of(found), RESOLVED, [pod], answers, NOW)
    assert (asked(found), results(found)) == ([], {"demo-0": "Passed"})
    entry, reference = found.pods[0], found.references[0]
    assert (entry.p_value, entry.checked_time, entry.fingerprint, entry.revision) == ("1", NOW, print_, "r1")
    assert message(found) == "its vectors are the reference: there was nothing to compare them with"
    assert (reference.name, reference.pod, reference.vectors) == (CHECK, "demo-0", packed(engine(1), 12))


def test_what_was_found_is_known_to_the_next_process() -> None:
    pod = a_pod(0)
    found = check_pods(fleet_of(), RESOLVED, [pod], {"u0": an_answer(pod, engine(1))}, NOW)
    again = check_pods(fleet_of(found), RESOLVED, [pod], {}, NOW)
    assert (again.pods, again.references, again.asks) == (found.pods, found.references, [])


def test_a_pod_is_checked_again_after_a_start_and_after_the_interval() -> None:
    pod = a_pod(0)
    found = check_pods(fleet_of(), RESOLVED, [pod], {"u0": an_answer(pod, engine(1))}, NOW)
    fleet, answers = fleet_of(found), {"u0": an_answer(pod, engine(1))}
    assert not asked(check_pods(fleet, RESOLVED, [pod], answers, NOW + DAY - timedelta(seconds=1)))
    due = check_pods(fleet, RESOLVED, [pod], answers, NOW + DAY)
    # It passes until another result is known.
    assert (asked(due), results(due)) == (["demo-0"], {"demo-0": "Passed"})
    restarted = a_pod(0, starts=1)
    due = check_pods(fleet, RESOLVED, [restarted], answers, NOW)
    assert (asked(due), results(due)) == (["demo-0"], {"demo-0": "Pending"})
    wrong = check_pods(fleet, RESOLVED, [pod], {"u0": an_answer(pod, engine(2), at=NOW + DAY)}, NOW + DAY)
    assert results(wrong) == {"demo-0": "Failed"}
    # What a former process heard is not known to this one, which asks.
    assert not asked(wrong)
    assert asked(check_pods(fleet_of(wrong), RESOLVED, [pod], {}, NOW + DAY)) == ["demo-0"]


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        (a_pod(0, ready=False), "the pod is not ready"),
        (a_pod(0, ip=None), "the pod computes its nonces"),
    ],
    ids=["not ready", "no address"],
)
def test_who_cannot_be_asked_is_pending(pod: PodView, says: str) -> None:
    found = check_pods(fleet_of(), RESOLVED, [pod], {}, NOW)
    assert (asked(found), results(found), message(found)) == ([], {"demo-0": "Pending"}, says)


def test_what_went_wrong_with_the_question_is_told() -> None:
    pod = a_pod(0)
    found = check_pods(fleet_of(), RESOLVED, [pod], {"u0": an_answer(pod, None, error="no answer")}, NOW)
    assert (asked(found), results(found)) == (["demo-0"], {"demo-0": "Pending"})
    assert message(found) == "the pod cannot be checked: no answer"


def test_a_fleet_whose_spec_cannot_be_used_keeps_what_was_found() -> None:
    pod = a_pod(0)
    found = check_pods(fleet_of(), RESOLVED, [pod], {"u0": an_answer(pod, engine(1))}, NOW)
    kept = check_pods(fleet_of(found), None, [pod, a_pod(1)], {}, NOW + DAY)
    assert (asked(kept), results(kept)) == ([], {"demo-0": "Passed", "demo-1": "Pending"})
    assert kept.references == found.references
    assert message(kept, 1) == "the fleet's spec cannot be used"


def test_too_many_numbers_are_refused_with_the_remedy() -> None:
    found = check_pods(fleet_of(), replace(RESOLVED, k_dim=4096), [a_pod(0)], {}, NOW)
    assert message(found) == "selfCheck.nonces times kDim, 4096, exceeds 65536: set fewer selfCheck.nonces"
    assert not found.asks


@pytest.mark.parametrize(
    ("self_check", "resolved", "name"),
    [
        ({}, RESOLVED, CHECK),
        ({}, replace(RESOLVED, seq_len=1024, k_dim=8), "org/model seqLen=1024 kDim=8 nonces=32"),
        (
            {"seqLen": 16, "kDim": 4, "nonces": 9},
            replace(RESOLVED, seq_len=1024),
            "org/model seqLen=16 kDim=4 nonces=9",
        ),
        ({}, replace(RESOLVED, args=["--revision=v1"]), "org/model@v1 seqLen=256 kDim=12 nonces=32"),
    ],
)
def test_what_is_computed_is_the_specs_else_the_presets(self_check: Any, resolved: Resolved, name: str) -> None:  # noqa: ANN401
    found = check_pods(fleet_of(**self_check), resolved, [a_pod(0, model="")], {}, NOW)
    assert found.asks[0].check.name == name


def test_pods_of_two_models_are_not_compared() -> None:
    """As while a fleet is updated to another model: each pod says by its arguments what it has loaded."""
    old, new = a_pod(0, model="org/old"), a_pod(1)
    answers = {"u0": an_answer(old, engine(2), check=CHECK.replace("model", "old", 1)), "u1": an_answer(new, engine(1))}
    found = check_pods(fleet_of(), RESOLVED, [old, new], answers, NOW)
    assert results(found) == {"demo-0": "Passed", "demo-1": "Passed"}
    assert [one.name.split()[0] for one in found.references] == ["org/old", "org/model"]
    # The vectors of a model that no pod has are forgotten.
    found = check_pods(fleet_of(found), RESOLVED, [new], answers, NOW)
    assert [one.pod for one in found.references] == ["demo-1"]


def test_a_failed_pod_is_shown_beside_the_other() -> None:
    pods = [a_pod(number) for number in range(3)]
    prints = [
        Fingerprint(gpu="H100", attention="FLASH_ATTN", flags="--block-size=16", batch="32 nonces"),
        Fingerprint(gpu="H100", attention="TRITON_ATTN", flags="--enforce-eager", batch="8 nonces"),
    ]
    answers = {f"u{n}": an_answer(pods[n], engine(1 if n < 2 else 2), fingerprint=prints[n == 2]) for n in range(3)}
    found = check_pods(fleet_of(), RESOLVED, pods, answers, NOW)
    assert results(found) == {"demo-0": "Passed", "demo-1": "Passed", "demo-2": "Failed"}
    assert message(found) == "its vectors are the reference"
    assert message(found, 1) == (
        "0 of 32 nonces differ from those of pod demo-0 (p-value 1, largest distance 0, threshold 0.4): the "
        "network would accept it"
    )
    said = message(found, 2)
    assert said.startswith("32 of 32 nonces differ from those of pod demo-0 (p-value 1e-32, largest distance 1.")
    assert said.endswith(
        ", threshold 0.4): the network would vote it out; its attention is TRITON_ATTN, not FLASH_ATTN; "
        "its flags are --enforce-eager, not --block-size=16; its batch is 8 nonces, not 32 nonces"
    )
    told = finding(found)
    assert told is not None
    assert told[0] == "SelfCheckFailed"
    assert told[1].startswith("1 of 3 pods fail the self-check: demo-2 (32 of 32 nonces differ")


def test_a_first_pod_that_was_wrong_is_outvoted() -> None:
    pods = [a_pod(number) for number in range(3)]
    answers: dict[str, CheckAnswer] = {}
    fleet, seen = fleet_of(), []
    for number, seed in enumerate([2, 1, 1]):
        answers[f"u{number}"] = an_answer(pods[number], engine(seed), at=NOW + timedelta(seconds=number))
        found = check_pods(fleet, RESOLVED, pods, answers, NOW)
        fleet = after(fleet, found)
        seen.append("".join(result[0] + result[1] for result in results(found).values()))
    assert seen == ["PaPePe", "PaFaPe", "FaPaPa"]
    assert found.references[0].pod == "demo-1"
    # As seen by the next process, which knows none of the answers, and hears the one that failed again.
    again = {"u0": an_answer(pods[0], engine(2), at=NOW + timedelta(seconds=9))}
    assert results(check_pods(fleet, RESOLVED, pods, again, NOW)) == results(found)


def test_a_pod_whose_answer_the_process_has_forgotten_is_asked_again_when_it_is_outvoted() -> None:
    pods = [a_pod(number) for number in range(3)]
    wrong = check_pods(fleet_of(), RESOLVED, pods[:1], {"u0": an_answer(pods[0], engine(2))}, NOW)
    # The next process hears the others alone.
    later = NOW + timedelta(seconds=9)
    answers = {f"u{n}": an_answer(pods[n], engine(1), at=later) for n in (1, 2)}
    found = check_pods(fleet_of(wrong), RESOLVED, pods, answers, later)
    assert (found.references[0].pod, asked(found)) == ("demo-1", ["demo-0"])
    answers["u0"] = an_answer(pods[0], engine(2), at=later + timedelta(seconds=1))
    done = check_pods(fleet_of(found), RESOLVED, pods, answers, later)
    assert (results(done)["demo-0"], asked(done)) == ("Failed", [])


@pytest.mark.parametrize("resolved", [RESOLVED, None], ids=["spec", "unusable spec"])
def test_the_reference_outlives_the_only_pod(resolved: Resolved | None) -> None:
    """As while it is replaced, or the fleet has no replicas for a time."""
    pod, later = a_pod(0), a_pod(0, starts=1)
    found = check_pods(fleet_of(), RESOLVED, [pod], {"u0": an_answer(pod, engine(1))}, NOW)
    gone = check_pods(fleet_of(found), resolved, [], {}, NOW)
    assert gone.references == found.references
    back = check_pods(fleet_of(gone), RESOLVED, [later], {"u0": an_answer(later, engine(2))}, NOW)
    assert results(back) == {"demo-0": "Failed"}
    assert "32 of 32 nonces differ from those of pod demo-0" in message(back)


def test_a_pod_that_cannot_compute_fails() -> None:
    pods = [a_pod(0), a_pod(1)]
    vectors = [None] * 5 + list(engine(1)[5:])
    answers = {"u0": an_answer(pods[0], vectors)}
    found = check_pods(fleet_of(), RESOLVED, pods, answers, NOW)
    assert (results(found), found.references) == ({"demo-0": "Failed", "demo-1": "Pending"}, [])
    assert message(found) == "5 of 32 nonces had no finite result: look at the pod's log and its GPUs"
    assert found.pods[0].p_value is None
    answers["u1"] = an_answer(pods[1], engine(1))
    assert results(check_pods(fleet_of(found), RESOLVED, pods, answers, NOW)) == {
        "demo-0": "Failed",
        "demo-1": "Passed",
    }


def test_without_self_checks_nothing_is_asked_and_all_is_forgotten() -> None:
    pod = a_pod(0)
    found = check_pods(fleet_of(), RESOLVED, [pod], {"u0": an_answer(pod, engine(1))}, NOW)
    off = check_pods(fleet_of(found, enabled=False), RESOLVED, [pod], {"u0": an_answer(pod, engine(1))}, NOW)
    assert (off.asks, off.references, results(off)) == ((), (), {"demo-0": "Pending"})
    assert message(off) == "it is not checked: selfCheck.enabled is false"


def shifted(vectors: Vectors, distance: float) -> Vectors:
    """Vectors so far away from these."""
    return [[number + distance / math.sqrt(12) for number in vector or ()] for vector in vectors]


def seen(fleet: PoCFleet) -> PoCFleet:
    """The fleet once its spec has been planned by."""
    status = fleet.status.model_copy(update={"observed_generation": fleet.metadata.generation})
    return fleet.model_copy(update={"status": status})


def golden(seed: int, nonces: int = 32) -> GoldenVectors:
    return GoldenVectors.model_validate({"seqLen": 256, "kDim": 12, "vectors": packed(engine(seed, nonces=nonces), 12)})


def test_vectors_of_a_preset_are_not_outvoted() -> None:
    pods = [a_pod(number) for number in range(3)]
    answers = {pod.uid: an_answer(pod, engine(2)) for pod in pods}
    measured = replace(RESOLVED, golden=golden(1))
    found = check_pods(fleet_of(), measured, pods, answers, NOW)
    assert (set(results(found).values()), found.references) == ({"Failed"}, [])
    assert "32 of 32 nonces differ from the preset's (p-value 1e-32, largest distance " in message(found)
    right = {pod.uid: an_answer(pod, engine(1)) for pod in pods}
    assert set(results(check_pods(fleet_of(), measured, pods, right, NOW)).values()) == {"Passed"}


@pytest.mark.parametrize(
    ("resolved", "engine_args", "says"),
    [
        (replace(RESOLVED, golden=golden(1, nonces=16)), [], "they are of nonces=16, and the check of nonces=32"),
        (replace(RESOLVED, golden=golden(1), seq_len=128), [], "they are of seqLen=256, and the check of seqLen=128"),
        (
            replace(RESOLVED, golden=golden(1)),
            ["--revision=v2"],
            "they are of model=org/model, and the check of model=org/model@v2",
        ),
        (
            replace(RESOLVED, golden=golden(1, nonces=8), k_dim=4),
            [],
            "they are of kDim=12 nonces=8, and the check of kDim=4 nonces=32",
        ),
        # Pods of an earlier model, while the fleet is updated to another one.
        (replace(RESOLVED, golden=golden(1), model="org/other"), [], ""),
    ],
    ids=["too few", "another length", "another revision", "several", "another model"],
)
def test_vectors_of_something_else_do_not_count_and_are_told_of(
    resolved: Resolved, engine_args: list[str], says: str
) -> None:
    fleet = a_fleet(selfCheck={}, engineArgs=engine_args)
    pod = a_pod(0, model=served_model(["org/model", *engine_args]))
    check = check_pods(fleet, resolved, [pod], {}, NOW).asks[0].check
    plain = check_pods(fleet, replace(resolved, golden=None), [pod], {"u0": answer_to(pod, check)}, NOW)
    for before in (fleet, after(fleet, plain)):
        found = check_pods(before, resolved, [pod], {"u0": answer_to(pod, check)}, NOW)
        assert (results(found), len(found.references)) == ({"demo-0": "Passed"}, 1)
        told = f"; the preset's vectors are not used: {says}" if says else ""
        assert message(found) == f"its vectors are the reference: there was nothing to compare them with{told}"


def answer_to(pod: PodView, check: Check) -> CheckAnswer:
    vectors = [(vector or ())[: check.k_dim] for vector in engine(2, nonces=check.nonces)]
    return an_answer(pod, vectors, check=check.name)


@pytest.mark.parametrize("vectors", ["AAA", packed([None], 12)])
def test_a_preset_with_unfit_vectors_says_so(vectors: str) -> None:
    text = f"""
        {{name: own, model: org/own, seqLen: 8, kDim: 12, gpus: [{{product: any, count: 1, tensor: 1}}],
        golden: {{seqLen: 8, kDim: 12, vectors: "{vectors}"}}}}"""
    with pytest.raises(PresetError, match="golden"):
        parse_preset(text)


def test_another_threshold_or_a_corrected_preset_counts_at_once() -> None:
    """The pods have answered already, and would be asked again only after a day."""
    reference = engine(1)
    off = shifted(reference, 0.35)
    pods = [a_pod(0), a_pod(1)]
    answers = {"u0": an_answer(pods[0], reference), "u1": an_answer(pods[1], off)}
    first = check_pods(fleet_of(), RESOLVED, pods, answers, NOW)
    assert results(first) == {"demo-0": "Passed", "demo-1": "Passed"}
    tight = after(fleet_of(statTest={"distThreshold": "0.1"}), first)
    observed = tight.status.model_copy(update={"observed_generation": tight.metadata.generation - 1})
    found = check_pods(tight.model_copy(update={"status": observed}), RESOLVED, pods, answers, NOW)
    assert results(found) == {"demo-0": "Passed", "demo-1": "Failed"}
    # A preset with wrong vectors, in a ConfigMap that is corrected afterwards.
    wrong, right = (Resolved(model="org/model", golden=golden(seed)) for seed in (9, 1))
    answers = {"u0": an_answer(pods[0], reference), "u1": an_answer(pods[1], reference)}
    failed = check_pods(fleet_of(), wrong, pods, answers, NOW)
    assert results(failed) == {"demo-0": "Failed", "demo-1": "Failed"}
    mended = check_pods(after(fleet_of(), failed), right, pods, answers, NOW)
    assert results(mended) == {"demo-0": "Passed", "demo-1": "Passed"}


@pytest.mark.parametrize(
    ("spec", "preset", "result", "threshold"),
    [
        ({}, {}, "Failed", "threshold 0.4"),
        ({}, {"dist_threshold": "0.75"}, "Passed", "threshold 0.75"),
        ({"distThreshold": "0.3"}, {"dist_threshold": "0.75"}, "Failed", "threshold 0.3"),
        ({"pMismatch": "0.95"}, {"dist_threshold": "0.3"}, "Passed", "threshold 0.3"),
    ],
    ids=["default", "preset", "spec", "both"],
)
def test_pods_are_judged_by_the_test_of_the_spec_else_of_the_preset(
    spec: dict[str, str], preset: dict[str, str], result: str, threshold: str
) -> None:
    pods = [a_pod(0), a_pod(1)]
    answers = {"u0": an_answer(pods[0], engine(1)), "u1": an_answer(pods[1], shifted(engine(1), 0.5))}
    resolved = replace(RESOLVED, stat_test=StatTest(**preset))
    found = check_pods(fleet_of(statTest=spec), resolved, pods, answers, NOW)
    assert results(found) == {"demo-0": "Passed", "demo-1": result}
    assert threshold in message(found, 1)


def test_another_test_of_a_preset_lets_a_pod_pass_at_once() -> None:
    """As with a newer operator, or a ConfigMap that is corrected."""
    pods = [a_pod(0), a_pod(1), a_pod(2)]
    vectors = [engine(1), shifted(engine(1), 0.5), [None] * 32]
    answers = {pod.uid: an_answer(pod, found) for pod, found in zip(pods, vectors, strict=True)}
    first = check_pods(fleet_of(), RESOLVED, pods, answers, NOW)
    assert results(first) == {"demo-0": "Passed", "demo-1": "Failed", "demo-2": "Failed"}
    told = first.references[0].model_dump(mode="json")
    wide = replace(RESOLVED, stat_test=StatTest(dist_threshold="0.75"))
    found = check_pods(seen(fleet_of(first)), wide, pods, answers, NOW)
    assert results(found) == {"demo-0": "Passed", "demo-1": "Passed", "demo-2": "Failed"}
    assert found.references[0].model_dump(mode="json") == told


STRICTER = {
    "another test": replace(RESOLVED, stat_test=StatTest(dist_threshold="0.3")),
    "vectors": replace(RESOLVED, golden=golden(1)),
}


@pytest.mark.parametrize("stricter", STRICTER.values(), ids=STRICTER)
@pytest.mark.parametrize("is_known", [True, False], ids=["same process", "next process"])
def test_what_a_stricter_preset_says_of_pods_that_have_passed_is_found_at_once(
    stricter: Resolved, is_known: bool
) -> None:
    """Of what this process has heard it is known already. Others are asked, and count as passed until they answer."""
    pods = [a_pod(number) for number in range(3)]
    vectors = [engine(1), engine(1), shifted(engine(1), 0.35)]
    if stricter.golden is not None:
        vectors = [engine(2)] * 3
    answers = {pod.uid: an_answer(pod, found) for pod, found in zip(pods, vectors, strict=True)}
    first = check_pods(fleet_of(), RESOLVED, pods, answers, NOW)
    assert set(results(first).values()) == {"Passed"}
    fails = {"demo-0": "Passed", "demo-1": "Passed", "demo-2": "Failed"}
    if stricter.golden is not None:
        fails = dict.fromkeys(results(first), "Failed")
    found = check_pods(seen(fleet_of(first)), stricter, pods, answers if is_known else {}, NOW)
    if is_known:
        assert (results(found), asked(found)) == (fails, [])
        return
    assert (results(found), asked(found)) == (results(first), ["demo-0", "demo-1", "demo-2"])
    assert not any(pod.barred for pod in with_bars(seen(fleet_of(found)), pods))
    later = NOW + timedelta(seconds=9)
    last = {pod.uid: an_answer(pod, found, at=later) for pod, found in zip(pods, vectors, strict=True)}
    done = check_pods(seen(fleet_of(found)), stricter, pods, last, later)
    assert (results(done), asked(done)) == (fails, [])
    # The next process has heard none of it, and knows by what they were judged.
    assert asked(check_pods(seen(fleet_of(done)), stricter, pods[:2], {}, later)) == (
        [] if stricter.golden is None else ["demo-0", "demo-1"]  # those that fail are asked in any case
    )


def test_pods_of_an_earlier_model_are_not_judged_by_the_test_of_the_next() -> None:
    """As while a fleet is updated from one preset to another."""
    pods = [a_pod(0, model="org/old"), a_pod(1, model="org/old")]
    old = CHECK.replace("model", "old", 1)
    loose = Resolved(model="org/old", stat_test=StatTest(dist_threshold="0.75"))
    vectors = [engine(1), shifted(engine(1), 0.5)]
    answers = {pod.uid: an_answer(pod, found, check=old) for pod, found in zip(pods, vectors, strict=True)}
    first = check_pods(fleet_of(), loose, pods, answers, NOW)
    for known in (answers, {}):
        found = check_pods(fleet_of(first), RESOLVED, pods, known, NOW)
        assert (results(found), asked(found)) == ({"demo-0": "Passed", "demo-1": "Passed"}, [])


def entry_of(pod: PodView, result: str, **fields: Any) -> FleetPod:  # noqa: ANN401
    return FleetPod(name=pod.name, uid=pod.uid, server=pod.server(8000), message="why", **{"result": result, **fields})


@pytest.mark.parametrize(
    ("entries", "barred", "failed"),
    [
        ([entry_of(a_pod(0), CheckResult.PASSED)], "", False),
        ([entry_of(a_pod(0), CheckResult.FAILED)], "self-check failed: why", True),
        ([entry_of(a_pod(0), CheckResult.PENDING)], "self-check: why", False),
        ([entry_of(a_pod(0, starts=1), CheckResult.PASSED)], "self-check: it has yet to be asked", False),
        ([entry_of(a_pod(0, starts=1), CheckResult.FAILED)], "self-check: it has yet to be asked", False),
        ([], "self-check: it has yet to be asked", False),
    ],
)
def test_only_a_pod_whose_server_has_passed_may_take_part(
    entries: Sequence[FleetPod], barred: str, failed: bool
) -> None:
    fleet = fleet_of(CheckedPods(pods=entries))
    (found,) = with_bars(fleet, [a_pod(0)])
    assert (found.barred, found.failed_check) == (barred, failed)
    # Without a fleet, without self-checks, and once the fleet goes, nobody is barred.
    going = {**fleet.metadata.model_dump(mode="json", by_alias=True), "deletionTimestamp": NOW.isoformat()}
    deleted = PoCFleet.parse({**fleet.model_dump(mode="json", by_alias=True), "metadata": going})
    for other in (None, fleet_of(CheckedPods(pods=entries), enabled=False), deleted):
        assert with_bars(other, [a_pod(0)]) == [a_pod(0)]


@pytest.mark.parametrize(
    ("args", "model"),
    [
        (["org/model", "--enable-poc"], "org/model"),
        (["org/model", "--revision=v1", "--revision", "v2"], "org/model@v2"),
        (["org/model", "--revision"], "org/model"),
        (["--enable-poc"], ""),
        ([], ""),
    ],
)
def test_what_a_pod_has_loaded_say_its_arguments(args: list[str], model: str) -> None:
    assert served_model(args) == model
    body = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [{"name": "vllm", "args": args}]},
    }
    assert PodView.parse(body).containers[0].model == model
