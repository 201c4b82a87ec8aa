# SPDX-License-Identifier: Apache-2.0
"""What a worker answers, and logs, when PoC fails on it."""

import importlib
import logging
from types import SimpleNamespace

import pytest

from vllm_poc.settings import SettingsError
from vllm_poc.start_checks import StartError
from vllm_poc.worker import extension
from vllm_poc.worker.extension import PocWorkerExtension
from vllm_poc.worker.model.ranks import OtherRankError
from vllm_poc.worker.passes import parity_check


class Worker(PocWorkerExtension):
    """A worker without a model, whose PoC fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _poc(self) -> None:  # type: ignore[override]
        raise self._error


@pytest.fixture(autouse=True)
def _logs_reach_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def test_a_worker_that_forgets_checks_the_pass_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of the weights: what was compared before says nothing of them."""
    checked: list[object] = []

    def checks(plain: object, _deadline: object) -> SimpleNamespace:
        checked.append(plain)
        return SimpleNamespace(facts={"findings": [f"check {len(checked)}"]}, slower=None)

    worker = PocWorkerExtension()
    monkeypatch.setattr(extension, "harmless", checks)
    monkeypatch.setattr(worker, "_poc_prepared", lambda _: object)
    assert [worker.poc_describe()["findings"] for _ in range(2)] == [["check 1"]] * 2  # type: ignore[typeddict-item]
    worker.poc_forget()
    assert worker.poc_describe()["findings"] == ["check 2"]  # type: ignore[typeddict-item]
    first, second = checked
    assert first is not second


def test_a_worker_that_lacks_memory_looks_again_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [MemoryError("no room"), MemoryError("no room"), SimpleNamespace(facts={"refusal": None}, slower=None)]

    def checks(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    worker = PocWorkerExtension()
    monkeypatch.setattr(extension, "harmless", checks)
    monkeypatch.setattr(worker, "_poc_prepared", lambda _: object)
    assert [worker.poc_describe() for _ in range(2)] == [{"error": "MemoryError: no room"}] * 2
    assert [worker.poc_describe().get("refusal", "failed") for _ in range(2)] == [None] * 2, "looked at once"


def test_a_pass_that_may_be_faster_by_now_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(facts={"fused": False}, slower=SimpleNamespace(passes=True))
    answers = [slow, slow, SimpleNamespace(facts={"fused": True}, slower=None)]
    seconds: list[float] = []

    def checks(_plain: object, deadline: parity_check.Deadline) -> SimpleNamespace:
        seconds.append(deadline.seconds)
        return answers.pop(0)

    worker = PocWorkerExtension()
    monkeypatch.setattr(extension, "harmless", checks)
    monkeypatch.setattr(worker, "_poc_prepared", lambda _: object)
    found = [worker.poc_describe(number) for number in (1.0, 2.0, 3.0, 4.0)]
    assert [facts["fused"] for facts in found] == [False, False, True, True]  # type: ignore[typeddict-item]
    assert seconds == [1.0, 2.0, 3.0], "as long as the server lets it"


@pytest.mark.parametrize(("device", "waits"), [("cuda:0", 1), ("cpu", 0)])
def test_a_worker_rests_once_its_device_has_done_all(device: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    worker = PocWorkerExtension()
    worker.model_runner = SimpleNamespace(device=device)
    assert worker.poc_rest() == {"rests": True}
    assert [str(one) for one in waited] == [device] * waits


def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    answer = Worker(RuntimeError("CUDA error")).poc_describe()
    assert answer == {"error": "RuntimeError: CUDA error"}
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "CUDA error"


def test_another_ranks_failure_is_logged_there(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(OtherRankError("rank 1"))
    worker.__dict__["_poc_together"] = lambda _: worker._poc()
    assert worker.poc_compute({}) == {"error": "OtherRankError: rank 1"}  # type: ignore[typeddict-item]
    assert not [record for record in caplog.records if record.exc_info]


def test_vllms_own_command_ends_before_it_loads_a_model_for_a_misspelt_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports the extension first, and the middleware last."""
    monkeypatch.setenv("VLLM_POC_TOKN", "secret")
    with pytest.raises(SettingsError, match="VLLM_POC_TOKN is not a setting"):
        importlib.reload(extension)


@pytest.mark.parametrize("version", ["0.22.1", "dev"])
def test_and_for_an_old_release(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)
    with pytest.raises(StartError, match=f"not for {version}: take one of them"):
        importlib.reload(extension)
