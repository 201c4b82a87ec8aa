# SPDX-License-Identifier: Apache-2.0
"""vLLM's workspace for experts, at whose addresses its CUDA graphs point, is large enough for any batch of PoC."""

import pytest

from tests.vllm.device import ON_GPU
from tests.vllm.families import Family
from vllm_poc.worker.batches import BatchRequest


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
    request = BatchRequest(
        protocol="artifact",
        block_hash="b10c",
        public_key="key",
        nonces=list(range(nonces)),
        seq_len=facts["max_batch_tokens"] // nonces,
        k_dim=12,
        strong_rng=False,
        layer_hooks=True,
        sign_flips=False,
        batch=nonces,
        ahead=[],
    )
    assert client.worker("poc_compute", request)["nonces"] == request["nonces"]
    assert client.worker("poc_test_workspace") == before
