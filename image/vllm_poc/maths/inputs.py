# SPDX-License-Identifier: Apache-2.0
"""Input embeddings of a nonce: standard normal numbers seeded by block hash, public key and nonce."""

from torch import Tensor

from vllm_poc.maths.sampling import fill_normal
from vllm_poc.maths.seeds import STRONG_SEEDS


def fill_inputs(out: Tensor, seeds: Tensor) -> None:
    """Write the embeddings of the nonces with these `vllm_poc.maths.seeds.input_seeds` into ``out``, row-major.

    ``out`` is contiguous ``[batch, seq_len, hidden]`` of any float type; ``seeds`` is int64 ``[batch, 1]``, or
    ``[batch, 8]`` for the stronger generator.
    """
    rows = out.view(len(out), -1)
    if seeds.shape[1] == STRONG_SEEDS:
        fill_from_strong_seeds(rows, seeds)
    else:
        fill_normal(rows, seeds[:, 0])


def fill_from_strong_seeds(rows: Tensor, seeds: Tensor) -> None:
    """Fill ``rows`` ``[batch, n]`` from sub-seeds int64 ``[batch, 8]``.

    With L = ceil(n/8), segment k is the normal vector of length min(L, n - kL) under sub-seed k;
    the segments are concatenated.
    """
    n = rows.shape[-1]
    length = -(-n // STRONG_SEEDS)
    full = n // length
    fill_normal(rows[:, : full * length].unflatten(1, (full, length)), seeds[:, :full])
    if full * length < n:
        fill_normal(rows[:, full * length :], seeds[:, full])
