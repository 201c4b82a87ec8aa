# SPDX-License-Identifier: Apache-2.0
"""What tests ask workers to compute."""

from collections.abc import Iterable, Sequence

from vllm_poc.worker.batches import BatchRequest


def a_batch(nonces: Sequence[int], *, seq_len: int, ahead: Iterable[Sequence[int]] = ()) -> BatchRequest:
    """Ask for the artifacts of nonces in one forward pass; those of ``ahead`` follow."""
    return BatchRequest(
        protocol="artifact",
        block_hash="b10c",
        public_key="key",
        nonces=list(nonces),
        seq_len=seq_len,
        k_dim=12,
        strong_rng=False,
        layer_hooks=True,
        sign_flips=False,
        batch=len(nonces),
        ahead=[list(following) for following in ahead],
    )
