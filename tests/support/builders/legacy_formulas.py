# SPDX-License-Identifier: Apache-2.0
"""Formulas of older protocol generations, which the product does not offer.

Their known answers still check the primitives underneath, so they are computed here.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_poc.maths.sampling import hashes, nonce_seeds, normal, normalise, seed_tensor, unit_normal


def permutation(block_hash: str, public_key: str, nonce: int, vocabulary: int) -> Tensor:
    """Return the stable order of the vocabulary's hashes."""
    seeds = torch.tensor(nonce_seeds(block_hash, public_key, nonce, ["permutations"]))
    return hashes(seeds, vocabulary)[0].argsort(stable=True)


def haar_matrix(block_hash: str, public_key: str, nonce: int, k_dim: int) -> Tensor:
    """Return Q ``[k, k]`` of the QR decomposition of a normal matrix, its signs made unique."""
    seeds = torch.tensor(nonce_seeds(block_hash, public_key, nonce, [f"haar_qr_{k_dim}"]))
    q, r = torch.linalg.qr(normal(seeds, k_dim * k_dim).view(k_dim, k_dim))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def k_dim_distance(picked: Tensor, block_hash: str, public_key: str, nonce: int) -> float:
    """Return the distance of the rotated pick ``[k]`` to the target of hash and key."""
    k_dim = picked.shape[0]
    rotated = normalise(haar_matrix(block_hash, public_key, nonce, k_dim) @ picked)
    target = unit_normal(seed_tensor([f"{block_hash}_{public_key}_target"], picked.device), k_dim)[0]
    return float((rotated - target).norm())


def entropy(seed: str) -> NDArray[np.uint32]:
    """Return 32 words: four digests of ``{seed}_{i}`` as little-endian uint32."""
    digests = b"".join(hashlib.sha256(f"{seed}_{i}".encode()).digest() for i in range(4))
    return np.frombuffer(digests, dtype="<u4")


def first_inputs(block_hash: str, public_key: str, nonce: int, size: int) -> NDArray[np.float64]:
    """Return the first generation's inputs, flat, before they are rounded to fp16."""
    words = entropy(f"{block_hash}_{public_key}_nonce{nonce}")
    return np.random.default_rng(np.random.SeedSequence(words.tolist())).standard_normal(size)
