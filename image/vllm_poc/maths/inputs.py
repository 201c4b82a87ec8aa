# SPDX-License-Identifier: Apache-2.0
"""Input embeddings of a nonce: standard normal numbers seeded by block hash, public key and nonce."""

from collections.abc import Sequence

from torch import Tensor

from vllm_poc.maths.sampling import fill_normal
from vllm_poc.maths.seeds import STRONG_SEEDS, input_text, seed_tensor, strong_seed_tensor


def fill_inputs(out: Tensor, block_hash: str, public_key: str, nonces: Sequence[int], *, strong_rng: bool) -> None:
    """Write the embeddings of ``nonces`` into ``out``, row-major, rounded to its type.

    ``out`` is contiguous ``[len(nonces), seq_len, hidden]`` in the model's dtype. ``strong_rng``
    takes the 256-bit seed (see `fill_from_strong_seeds`) instead of the 32-bit one. ValueError if
    the first dimension is not the number of nonces.
    """
    if out.shape[0] != len(nonces):
        raise ValueError(f"out holds {out.shape[0]} nonces, but nonces names {len(nonces)}: make them equal")
    texts = [input_text(block_hash, public_key, nonce) for nonce in nonces]
    rows = out.view(len(nonces), -1)
    if strong_rng:
        fill_from_strong_seeds(rows, strong_seed_tensor(texts, out.device))
    else:
        fill_normal(rows, seed_tensor(texts, out.device))


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
