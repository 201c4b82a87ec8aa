# SPDX-License-Identifier: Apache-2.0
"""vLLM knows the flags of all presets, and their values."""

import pytest

from poc_operator.fleets.resolve import GpuEntry, Preset, packaged
from vllm_poc.cli import parse_as_server

pytestmark = pytest.mark.vllm

ENTRIES = [(preset, gpu) for preset in packaged().values() if isinstance(preset, Preset) for gpu in preset.gpus]

#: The first releases that know a preset's model. docs/operate/fleets.md says so.
FIRST_RELEASES = {"glm-5.3-flash": (0, 30)}


@pytest.mark.parametrize(("preset", "gpu"), ENTRIES, ids=[f"{preset.name} on {gpu}" for preset, gpu in ENTRIES])
def test_the_flags_of_a_preset_are_vllms(preset: Preset, gpu: GpuEntry) -> None:
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415 - present in its environment alone
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    from vllm import __version__  # noqa: PLC0415 - present in its environment alone

    first = FIRST_RELEASES.get(preset.name, (0, 0))
    if tuple(map(int, __version__.split(".")[:2])) < first:
        pytest.skip(f"the model needs vLLM {'.'.join(map(str, first))}")
    found = parse_as_server(["--model", preset.model, *preset.args, *gpu.args])
    assert found.gpu_memory_utilization > 0
    if found.tool_call_parser is not None:
        assert ToolParserManager.get_tool_parser(found.tool_call_parser)
        assert ReasoningParserManager.get_reasoning_parser(found.reasoning_parser)
