# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks ask workers to compute, as a server asks."""

from collections.abc import Iterable, Sequence

from vllm_poc.rpc import BatchRequest, batch_request
from vllm_poc.wire.messages import ArtifactParams, RoundRequest


def a_batch(
    nonces: Sequence[int],
    *,
    seq_len: int,
    protocol: str = "artifact",
    batch: int | None = None,
    ahead: Iterable[Sequence[int]] = (),
    strong_rng: bool = False,
) -> BatchRequest:
    """Ask for results of nonces in forward passes of ``batch`` nonces, or in one; those of ``ahead`` follow."""
    params = ArtifactParams(model="any", seq_len=seq_len) if protocol == "artifact" else None
    asked = RoundRequest(
        block_hash="b10c",
        block_height=7,
        public_key="key",
        poc_stronger_rng=strong_rng,
        params=params,
        r_target=None if params is not None else 1.4,
        seq_len=None if params is not None else seq_len,
    )
    return batch_request(asked, nonces, batch or len(nonces), ahead)
