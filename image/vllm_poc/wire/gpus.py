# SPDX-License-Identifier: Apache-2.0
"""Messages about the GPUs of a pod: ``GET gpus``, which is ours.

Null is what a GPU, its driver or its management library does not tell.
"""

from typing import Annotated

from pydantic import Field

from vllm_poc.wire.messages import ShortText, WireMessage

#: More GPUs than any machine has.
MAX_GPUS = 64

Reading = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=2**63)]


class Gpu(WireMessage):
    """One GPU, by its index in the pod. ``error`` says why nothing else is known of it.

    Sizes are bytes, temperatures °C, powers watts, clocks hertz. ``clocks_event_reasons`` are NVML's bits for what
    keeps the clock down. Errors of the memory are counted over the GPU's life, replays since the driver was loaded.
    """

    index: int = Field(ge=0, lt=MAX_GPUS)
    name: ShortText | None = None
    memory_total_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    utilization_percent: Reading | None = None
    temperature_celsius: Reading | None = None
    memory_temperature_celsius: Reading | None = None
    power_watts: Reading | None = None
    power_limit_watts: Reading | None = None
    sm_clock_hertz: Reading | None = None
    sm_clock_max_hertz: Reading | None = None
    clocks_event_reasons: Count | None = None
    ecc_double_bit_errors: Count | None = None
    pcie_replays: Count | None = None
    error: ShortText | None = None


class GpusResponse(WireMessage):
    """The GPUs that the pod sees: none on a CPU, or without NVML; and the versions of what tells of them."""

    devices: list[Gpu] = Field(default_factory=list, max_length=MAX_GPUS)
    driver_version: ShortText | None = None
    cuda_driver_version: ShortText | None = None
    nvml_version: ShortText | None = None
