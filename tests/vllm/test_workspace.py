# SPDX-License-Identifier: Apache-2.0
"""vLLM's workspace for experts, at whose addresses its CUDA graphs point, is large enough for any batch of PoC."""

import pytest

from tests.support.builders.batches import a_batch
from tests.vllm.device import ON_GPU
from tests.vllm.families import Family


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="experts have a workspace on a GPU only")
@pytest.mark.parametrize("family", ["qwen3-moe"], indirect=True)
@pytest.mark.parametrize("longest", [True, False])
def test_the_largest_batch_leaves_the_workspace_as_it_is(family: Family, longest: bool) -> None:
    client = family.client
    facts = client.worker("poc_describe")
    # As many tokens as a batch can have, in sequences as long or as short as they can then be.
    fewest = facts["max_batch_tokens"] // facts["max_model_len"]
    nonces = fewest if longest else facts["max_batch_nonces"]
    before = client.worker("poc_test_workspace")
    assert before[0], "vLLM must have locked its workspace"
    request = a_batch(range(nonces), seq_len=facts["max_batch_tokens"] // nonces)
    assert client.worker("poc_compute", request)["nonces"] == request["nonces"]
    assert client.worker("poc_test_workspace") == before
