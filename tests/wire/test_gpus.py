# SPDX-License-Identifier: Apache-2.0
"""What a pod tells of its GPUs. Of NVML only its binding is a stand-in; without one a pod has no GPUs."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.servers.pod import Pod
from vllm_poc.server import nvml
from vllm_poc.wire.messages import API_PREFIX


class NvmlError(Exception):
    """What the binding raises."""


def binding(**functions: Any) -> ModuleType:  # noqa: ANN401
    """A binding with two GPUs, of which the second is lost; what it lacks, a GPU does not have."""
    module: Any = ModuleType("pynvml")

    def handle(index: int) -> int:
        if index == 1:
            raise NvmlError("GPU is lost")
        return index

    def refuse(*_: object) -> int:
        raise NvmlError("Not Supported")

    module.NVMLError = NvmlError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = handle
    module.nvmlSystemGetCudaDriverVersion = lambda: 13010
    module.nvmlSystemGetDriverVersion = lambda: b"580.1"
    module.nvmlSystemGetNVMLVersion = lambda: "13.580.1"
    module.nvmlDeviceGetName = lambda _: "NVIDIA H200"
    module.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(total=150 * 2**30, free=100 * 2**30, used=50 * 2**30)
    module.nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=87)
    module.nvmlDeviceGetTemperature = lambda _, which: 41 + which
    module.nvmlDeviceGetPowerUsage = lambda _: 412_300
    module.nvmlDeviceGetEnforcedPowerLimit = lambda _: 700_000
    module.nvmlDeviceGetClockInfo = lambda _, __: 1980
    module.nvmlDeviceGetTotalEccErrors = refuse
    reading = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=55))
    module.nvmlDeviceGetFieldValues = lambda _, fields: [reading for _ in fields]
    for name, function in functions.items():
        setattr(module, name, function)
    made: ModuleType = module
    return made


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    for known in (nvml._nvml, nvml._xid_errors):
        known.cache_clear()
    yield
    for known in (nvml._nvml, nvml._xid_errors):
        known.cache_clear()


async def ask(pod: Pod) -> Any:  # noqa: ANN401
    answer = await pod.http.get(f"{API_PREFIX}/gpus")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_without_nvml_there_are_no_gpus(pod: Pod) -> None:
    nothing: dict[str, Any] = {"devices": [], "driver_version": None, "cuda_driver_version": None, "nvml_version": None}
    assert await ask(pod) == nothing


async def test_without_a_driver_there_are_no_gpus(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NvmlError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", binding(nvmlInit=refuse))
    assert (await ask(pod))["devices"] == []


async def test_a_driver_that_fails_later_leaves_no_gpus(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", binding(nvmlDeviceGetCount=refuse))
    assert (await ask(pod))["devices"] == []


async def test_gpus_are_told_with_the_sensors_that_they_have(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", binding())
    told = await ask(pod)
    assert (told["driver_version"], told["cuda_driver_version"], told["nvml_version"]) == ("580.1", "13.1", "13.580.1")
    first, lost = told["devices"]
    assert {name: value for name, value in first.items() if value is not None} == {
        "index": 0,
        "name": "NVIDIA H200",
        "memory_total_bytes": 150 * 2**30,
        "memory_free_bytes": 100 * 2**30,
        "memory_used_bytes": 50 * 2**30,
        "utilization_percent": 87,
        "temperature_celsius": 41,
        "memory_temperature_celsius": 55,
        "power_watts": pytest.approx(412.3),
        "power_limit_watts": 700,
        "sm_clock_hertz": 1_980_000_000,
    }
    assert {name: value for name, value in lost.items() if value is not None} == {"index": 1, "error": "GPU is lost"}


def events(*found: tuple[int, int, int]) -> dict[str, Any]:
    """The part of a binding that tells of events: GPU, kind and number of each, the first one first."""
    left = list(found)
    registered = dict[int, int]()

    def wait(_: object, milliseconds: int) -> SimpleNamespace:
        assert milliseconds == 0, "nobody waits for events"
        if not left:
            raise NvmlError("Timeout")
        device, kind, number = left.pop(0)
        assert registered[device] & kind
        return SimpleNamespace(device=device, eventType=kind, eventData=number)

    return {
        "nvmlEventSetCreate": object,
        "nvmlDeviceRegisterEvents": lambda gpu, kinds, _: registered.update({gpu: kinds}),
        "nvmlEventSetWait_v2": wait,
        "nvmlDeviceGetIndex": lambda gpu: gpu,
        "left": left,
    }


async def test_xid_errors_are_counted_but_for_those_of_programs(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    told = events((0, 8, 13), (0, 8, 79), (0, 8, 31), (0, 8, 94))
    monkeypatch.setitem(sys.modules, "pynvml", binding(**told))
    first, lost = (await ask(pod))["devices"]
    assert (first["xid_errors"], first["last_xid"]) == (2, 94)
    assert (lost["xid_errors"], lost["error"]) == (None, "GPU is lost")
    told["left"].append((0, 8, 48))
    assert [(await ask(pod))["devices"][0][name] for name in ("xid_errors", "last_xid")] == [3, 48]


async def test_a_gpu_without_xid_errors_says_so(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", binding(**events()))
    first, _ = (await ask(pod))["devices"]
    assert (first["xid_errors"], first["last_xid"]) == (0, None)


async def test_a_driver_that_tells_of_no_events_tells_the_rest(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NvmlError("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", binding(nvmlEventSetCreate=refuse))
    first, _ = (await ask(pod))["devices"]
    assert (first["xid_errors"], first["utilization_percent"]) == (None, 87)


async def test_an_error_of_a_gpu_that_is_lost_counts(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has fallen off the bus, and cannot tell which one it was."""

    def refuse(_: object) -> int:
        raise NvmlError("GPU is lost")

    monkeypatch.setitem(sys.modules, "pynvml", binding(**events((0, 8, 79)) | {"nvmlDeviceGetIndex": refuse}))
    first, _ = (await ask(pod))["devices"]
    assert (first["xid_errors"], first["last_xid"]) == (1, 79)


async def test_an_older_binding_tells_the_rest(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    module = binding(**events())
    del module.nvmlEventSetWait_v2
    monkeypatch.setitem(sys.modules, "pynvml", module)
    first, _ = (await ask(pod))["devices"]
    assert (first["xid_errors"], first["utilization_percent"]) == (None, 87)
