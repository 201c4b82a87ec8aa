# SPDX-License-Identifier: Apache-2.0
"""Which flags of vLLM a server tells as those that may change results."""

from types import SimpleNamespace as Part

import pytest

from vllm_poc.worker.model.flags import result_flags


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (Part(), []),
        (
            Part(
                parallel_config=Part(tensor_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=False),
                model_config=Part(enforce_eager=False),
                cache_config=Part(block_size=None),
            ),
            [],
        ),
        (
            Part(
                parallel_config=Part(tensor_parallel_size=4, pipeline_parallel_size=2, disable_custom_all_reduce=True),
                model_config=Part(enforce_eager=True),
                cache_config=Part(block_size=16),
            ),
            [
                "--tensor-parallel-size=4",
                "--pipeline-parallel-size=2",
                "--block-size=16",
                "--enforce-eager",
                "--disable-custom-all-reduce",
            ],
        ),
        (
            Part(parallel_config=Part(enable_expert_parallel=True, enable_eplb=True)),
            ["--enable-expert-parallel", "--enable-eplb"],
        ),
    ],
    ids=["unknown", "defaults", "sizes and sums", "experts"],
)
def test_flags_are_told_as_they_took_effect(config: object, flags: list[str]) -> None:
    assert result_flags(config) == flags
