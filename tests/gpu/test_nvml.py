# SPDX-License-Identifier: Apache-2.0
"""NVML's own binding and driver tell what `vllm_poc.server.nvml` asks for."""

from vllm_poc.server.nvml import read_gpus


def test_each_gpu_has_its_sensors_and_counts_xid_errors() -> None:
    found = read_gpus()
    assert found.devices
    for gpu in found.devices:
        assert gpu.error is None
        assert gpu.memory_total_bytes
        assert gpu.temperature_celsius is not None
        assert gpu.xid_errors == 0, "errors since this process began, which come from no program"
        assert gpu.last_xid is None
