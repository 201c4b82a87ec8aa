# SPDX-License-Identifier: Apache-2.0
"""`kubectl poc` still understands what vLLM logs while it starts: its words change from release to release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poc_operator.cli.loading import CAPTURING, COMPILING, ENGINE, POC, PREPARING, PROBE, READING, SERVER, step_of
from tests.vllm.device import ON_GPU
from tests.vllm.families import FAMILIES

if TYPE_CHECKING:
    from tests.vllm.families import Family


def test_the_log_of_a_server_tells_each_step_of_its_start(family: Family) -> None:
    told = [step for line in family.client.log.read_text().splitlines() if (step := step_of(line))]
    steps = list(dict.fromkeys(step.step for step in told))
    compiles = "--enforce-eager" not in FAMILIES[family.name]
    engine = [ENGINE, READING, PREPARING, *([COMPILING] if compiles else [])]
    graphs = [CAPTURING] if compiles and ON_GPU else []
    expected = [*engine, *graphs, SERVER, POC, PROBE]
    assert [step for step in steps if step in {*expected, COMPILING, CAPTURING}] == expected
    read = [step for step in told if step.step == READING and step.files]
    assert [(step.percent, step.done) for step in read[-1:]] == [(100, read[-1].files)]
