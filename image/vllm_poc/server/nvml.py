# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this pod, as NVIDIA's management library (NVML) tells of them.

The library's binding comes with vLLM. Where it or the driver is missing, as on a CPU, there are no GPUs. A sensor that
a GPU does not have is null. Xid errors are what the driver calls its errors; those that programs cause are left out.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

from vllm_poc.wire.answers import Gpu, GpusResponse

_log = logging.getLogger(__name__)

_BINDINGS = ("pynvml", "vllm.third_party.pynvml")
#: Numbers of NVML's own enumerations, which its binding does not name alike in all releases.
_TEMPERATURE_CORE, _CLOCK_SM, _ECC_UNCORRECTED, _ECC_AGGREGATE, _FIELD_MEMORY_TEMPERATURE = 0, 1, 1, 1, 82
_MEGA, _MILLI = 1_000_000, 1e-3
_EVENT_XID = 8
#: Xid errors that a program causes by what it does, as by a wrong address. They say nothing of the GPU.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
#: No more events are taken at once.
_MOST_EVENTS = 1_000

_Read = Callable[[ModuleType, Any], object]
#: Field of `Gpu`: how it is read from a device's handle.
_SENSORS: Mapping[str, _Read] = {
    "utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, _TEMPERATURE_CORE),
    "memory_temperature_celsius": lambda nvml, gpu: _field(nvml, gpu, _FIELD_MEMORY_TEMPERATURE),
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) * _MILLI,
    "power_limit_watts": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) * _MILLI,
    "sm_clock_hertz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, _CLOCK_SM) * _MEGA,
    "sm_clock_max_hertz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, _CLOCK_SM) * _MEGA,
    "clocks_event_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    "ecc_double_bit_errors": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, _ECC_UNCORRECTED, _ECC_AGGREGATE),
    "pcie_replays": lambda nvml, gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu),
}


class XidErrors:
    """The Xid errors of GPUs since it was made: the driver keeps them until they are taken."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._found: dict[int, tuple[int, int | None]] = {}  # count and last number, by the GPU's index
        self._wait, self._index_of = nvml.nvmlEventSetWait_v2, nvml.nvmlDeviceGetIndex
        self._events = nvml.nvmlEventSetCreate()
        self._taking = Lock()
        for index in range(nvml.nvmlDeviceGetCount()):
            # A GPU that is lost, or that tells of no events, is left out.
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), _EVENT_XID, self._events)
                self._found[index] = 0, None

    def take(self) -> Mapping[int, tuple[int, int | None]]:
        """Return how many there were, and the number of the last one, by the GPU's index."""
        with self._taking, suppress(self._nvml.NVMLError):  # as when there are no more
            for _ in range(_MOST_EVENTS):
                event = self._wait(self._events, 0)
                if event.eventData not in _XIDS_OF_PROGRAMS:
                    for index in self._of(event.device):
                        count, _ = self._found.get(index, (0, None))
                        self._found[index] = count + 1, event.eventData
        return dict(self._found)

    def _of(self, device: object) -> list[int]:
        """Return the index of a GPU. One that is lost cannot tell it: it may be each."""
        try:
            return [self._index_of(device)]
        except self._nvml.NVMLError:
            return list(self._found)


def read_gpus() -> GpusResponse:
    """Return the GPUs of this pod; none if NVML is not there. It blocks for some milliseconds."""
    nvml = _nvml()
    if nvml is None:
        return GpusResponse()
    watched = _xid_errors(nvml)
    xids = watched.take() if watched is not None else {}
    try:
        count = nvml.nvmlDeviceGetCount()
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return GpusResponse(
            devices=[_gpu(nvml, index, *xids.get(index, (None, None))) for index in range(count)],
            driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda_driver_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            nvml_version=_text(nvml.nvmlSystemGetNVMLVersion()),
        )
    except nvml.NVMLError as error:
        _log.warning("NVML does not tell of the GPUs: %s", error)
        return GpusResponse()


@cache
def _nvml() -> ModuleType | None:
    """Return the binding, initialised once; None if there is none or it finds no driver."""
    for name in _BINDINGS:
        try:
            nvml = importlib.import_module(name)
        except ImportError:
            continue
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return nvml
        return None
    return None


@cache
def _xid_errors(nvml: ModuleType) -> XidErrors | None:
    """Return what counts the Xid errors of this process's GPUs; None if the driver tells of no events."""
    try:
        return XidErrors(nvml)
    except (nvml.NVMLError, AttributeError) as error:
        _log.warning("NVML does not tell of Xid errors: %s", error)
        return None


def _gpu(nvml: ModuleType, index: int, xid_errors: int | None, last_xid: int | None) -> Gpu:
    told = {"index": index, "xid_errors": xid_errors, "last_xid": last_xid}
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        fields = {"name": _text(nvml.nvmlDeviceGetName(gpu))} | {
            f"memory_{word}_bytes": int(getattr(memory, word)) for word in ("total", "free", "used")
        }
    except nvml.NVMLError as error:
        return Gpu.model_validate(told | {"error": str(error)})
    sensors = {name: _sensor(nvml, gpu, read) for name, read in _SENSORS.items()}
    return Gpu.model_validate(told | fields | sensors)


def _sensor(nvml: ModuleType, gpu: object, read: _Read) -> object | None:
    # What a GPU or a driver does not have, NVML refuses; an older binding lacks the function.
    try:
        return read(nvml, gpu)
    except (nvml.NVMLError, AttributeError):
        return None


def _field(nvml: ModuleType, gpu: object, number: int) -> int | None:
    (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [number])
    return int(value.value.uiVal) if value.nvmlReturn == 0 else None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
