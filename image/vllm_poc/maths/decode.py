# SPDX-License-Identifier: Apache-2.0
"""Decode scheme: the seeds, inputs, picks, expert choices and snaps of a chain of one-token steps, and its codebook.

The prefill of a nonce is step 0, and decode steps count from 1. Each step snaps its hidden state to the nearest
of 16 points of a codebook, and the next step's seeds depend on that point's index:

    key       = (prev_k * 0x9E3779B1 + step * 0x85EBCA77 + salt) mod 2^32
    step seed = murmur(key, base)           base: the seed of the nonce's inputs

Formulas are those of the network's plugin (`decode_random`, `native` and `sphere`). ``previous`` is the index that
the last step chained: the own snap when computing, the prover's claim when validating. Any int64 is defined, since
only its low 32 bits count. Indices and seeds are int64 tensors ``[batch]`` throughout.

The codebook is 16 unit vectors of 256 coordinates, the same ones in the whole network. It was made once, and running
its recipe again gives slightly other vectors. So a server takes them from the network's file, `sphere_codebook.pt`, and
checks both the file and the numbers in it. Rebuilt ones are for experiments: near borders between points they give
other indices.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.maths.artifact import pick_indices
from vllm_poc.maths.sampling import fill_normal, hashes, murmur, normalise, seed, seed_tensor, unit_normal
from vllm_poc.wire.artifacts import CODEBOOK_POINTS
from vllm_poc.wire.stat_test import OUT_OF_RANGE_MARGIN

#: Coordinates of a hidden state that meet the codebook, which is float32 ``[16, 256]``.
PICKED_COORDINATES = 256
#: Index of a step whose picked coordinates are not all finite.
NO_POINT = -1
#: Logits of chosen experts descend from this plus top_k to this plus 1; the others get `_NOT_CHOSEN`.
LADDER_BASE = 100
_NOT_CHOSEN = -10_000.0
_MIX_PREVIOUS = 0x9E3779B1
_MIX_STEP = 0x85EBCA77
_WORD = 0xFFFF_FFFF
_SHAPE = (CODEBOOK_POINTS, PICKED_COORDINATES)
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
_REBUILD_STEPS, _LEARNING_RATE, _TINY = 500, 0.05, 1e-8


class Salt(IntEnum):
    """What a step's seed is for."""

    INPUT = 0x0D
    PICK = 0x91
    TOKEN = 0x57


class Snap(NamedTuple):
    """``points`` int64 ``[batch]``, `NO_POINT` where not finite; ``scores`` float32 ``[batch, 16]``, zero there."""

    points: Tensor
    scores: Tensor


def step_seeds(bases: Tensor, previous: Tensor, *, step: int | Tensor, salt: Salt) -> Tensor:
    """Return the seeds ``[batch]`` of a decode step, for `input_seeds` without the stronger generator.

    ``step`` is 1 or more, one for all rows or int64 ``[batch]``.
    """
    # int64 products wrap modulo 2^64, which leaves the low 32 bits right.
    keys = ((previous & _WORD) * _MIX_PREVIOUS + step * _MIX_STEP + int(salt)) & _WORD
    return murmur(bases, keys.unsqueeze(-1)).squeeze(-1)


def fill_step_inputs(out: Tensor, bases: Tensor, previous: Tensor, *, step: int | Tensor) -> None:
    """Write a decode step's embeddings, standard normal numbers, into ``out`` ``[batch, hidden]`` of any float type."""
    fill_normal(out, step_seeds(bases, previous, step=step, salt=Salt.INPUT))


def step_token_ids(bases: Tensor, previous: Tensor, *, step: int | Tensor, vocabulary: int) -> Tensor:
    """Return a decode step's token ids, int32 ``[batch]``, for models that choose experts by token id.

    Those of the prefill are `sampling.token_ids`, as in the prefill scheme.
    """
    seeds = step_seeds(bases, previous, step=step, salt=Salt.TOKEN)
    return hashes(seeds, 1).squeeze(-1).remainder_(vocabulary).to(torch.int32)


def prefill_pick_seed(block_hash: str, public_key: str, nonce: int) -> int:
    """Return the seed of the pick at step 0, which is a text's and not a step seed."""
    return seed(f"{block_hash}_{public_key}_nonce_{nonce}_pick_{PICKED_COORDINATES}_decode0")


def step_picks(bases: Tensor, previous: Tensor, *, step: int | Tensor, hidden: int) -> Tensor:
    """Return a decode step's coordinates; see `picks`."""
    return picks(step_seeds(bases, previous, step=step, salt=Salt.PICK), hidden=hidden)


def picks(seeds: Tensor, *, hidden: int) -> Tensor:
    """Return int64 ``[batch, 256]``: the coordinates with the smallest hashes, in the order of `pick_indices`.

    The order decides which coordinate meets which column of the codebook. ValueError if ``hidden`` is below 256.
    """
    if hidden < PICKED_COORDINATES:
        raise ValueError(
            f"hidden size {hidden} is below {PICKED_COORDINATES}, the coordinates that the decode scheme picks: "
            "use a larger model"
        )
    return pick_indices(seeds, hidden=hidden, k_dim=PICKED_COORDINATES)


def snap(hidden_states: Tensor, indices: Tensor, codebook: Tensor) -> Snap:
    """Return the point of ``codebook`` nearest to each row's picked coordinates; the first of equals.

    ``hidden_states`` ``[batch, hidden]`` is the output of the final norm, ``indices`` ``[batch, 256]`` of `picks`,
    ``codebook`` float32 ``[16, 256]``. Normalise -> pick -> normalise -> scalar products, in float32.
    """
    queries = normalise(normalise(hidden_states).gather(1, indices))
    finite = queries.isfinite().all(dim=1)
    # Not by multiplication: zero times NaN is NaN.
    scores = torch.where(finite.unsqueeze(1), queries @ codebook.T, 0.0)
    return Snap(torch.where(finite, scores.argmax(dim=1), NO_POINT), scores)


def claimed_margins(scores: Tensor, claims: Tensor) -> Tensor:
    """Return float32 ``[batch]``: how far the claimed point's score lies below the best, 0 or more.

    ``scores`` ``[batch, 16]`` are the validator's own. 2.0 for a claim outside 0..15.
    """
    known = (claims >= 0) & (claims < CODEBOOK_POINTS)
    claimed = scores.gather(1, torch.where(known, claims, 0).unsqueeze(1)).squeeze(1)
    return torch.where(known, scores.amax(dim=1) - claimed, OUT_OF_RANGE_MARGIN)


def disagreements(points: Tensor, claims: Tensor) -> Tensor:
    """Return bool ``[batch]``: whether a step's own point differs from the claim. A step without a point does not."""
    return (points != claims) & (points >= 0)


def route_seed(block_hash: str, nonce: int, router: int) -> int:
    """Return the seed of a router's expert choice.

    ``router`` counts the routers with logits from 0 in the order of layers. Dense layers and layers that choose
    experts by token id take no number.
    """
    return seed(f"{block_hash}_n{nonce}_route_layer_{router}")


def route_starts(seeds: Tensor, steps: Tensor, *, experts: int) -> Tensor:
    """Return int64 ``[batch]``: the first chosen expert for `route_seed` s; ``experts`` counts those of all ranks.

    ``steps`` is int64 ``[batch]``; the step of all rows of a prefill is 0.
    """
    return murmur(seeds, steps.unsqueeze(-1)).squeeze(-1).remainder_(experts)


def route_logits(starts: Tensor, *, experts: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Return ``[batch, experts]`` of ``dtype``, which replaces a router's logits.

    Experts start, start + 1, ... (modulo ``experts``) get 100 + top_k down to 101, all others -10000, computed in
    float32. ValueError unless 1 <= top_k <= experts.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k {top_k} must lie in 1..{experts}, the model's number of experts")
    ranks = (torch.arange(experts, device=starts.device) - starts.unsqueeze(-1)).remainder_(experts)
    ladder = (LADDER_BASE + top_k - ranks).to(torch.float32)
    return torch.where(ranks < top_k, ladder, _NOT_CHOSEN).to(dtype)


def seeded_logits(seeds: Tensor, steps: Tensor, *, experts: int, top_k: int) -> Tensor:
    """Return float32 ``[routers, nonces, experts]``: `route_logits` of all routers.

    ``seeds`` is int64 ``[routers, nonces]``, ``steps`` int64 ``[nonces]``.
    """
    if not seeds.numel():  # no layer has a router
        return torch.zeros(*seeds.shape, experts, device=seeds.device)
    if seeds.is_cuda:
        from vllm_poc.kernels import router  # noqa: PLC0415 - needs a GPU's Triton

        sizes = {"experts": experts, "top_k": top_k, "base": LADDER_BASE}
        return router.seeded_logits(seeds, steps, **sizes, others=_NOT_CHOSEN)
    starts = route_starts(seeds, steps.expand_as(seeds), experts=experts)
    return route_logits(starts, experts=experts, top_k=top_k, dtype=torch.float32)


def nonce_layer_vectors(
    *, block_hash: str, nonces: Sequence[int], num_layers: int, hidden: int, device: torch.device
) -> Tensor:
    """Return float32 ``[nonces, num_layers, hidden]``: reflections of ``per_nonce_reflection``.

    They take the place of `sampling.layer_vectors`, which are the same for all nonces of a block.
    """
    texts = (f"{block_hash}_nonce{nonce}_layer_{layer}_householder" for nonce in nonces for layer in range(num_layers))
    return unit_normal(seed_tensor(texts, device).view(len(nonces), num_layers), hidden)


class CodebookHashes(NamedTuple):
    """SHA-256, in hex: of the file, and of the float32 numbers in it, row by row in little endian."""

    file: str
    numbers: str


#: Of the file that the network froze.
FROZEN = CodebookHashes(
    file="73d57b52b284c0efb0aaabe47707fd5d281d70abbd58fd04a6c5766a74a3c4b9",
    numbers="2201d1093583f43f328dd4643ddf1f34737f6da8c1956395c43fd093e357e34f",
)


class Codebook(NamedTuple):
    """``points`` float32 ``[16, 256]`` on the CPU. What a rebuilt one gave has to say so."""

    points: Tensor
    rebuilt: bool


def open_codebook(path: Path | None, *, rebuild: bool = False) -> Codebook:
    """Return the codebook in the file, or a rebuilt one for an experiment.

    ValueError if neither is given, if both are, or as for `load_codebook`.
    """
    if path is None and not rebuild:
        raise ValueError("the decode scheme needs the network's codebook: give the path of its sphere_codebook.pt")
    if path is not None and rebuild:
        raise ValueError(f"there is a codebook at {path}, and one is to be rebuilt: ask for one of them")
    return Codebook(rebuild_codebook(), rebuilt=True) if path is None else Codebook(load_codebook(path), rebuilt=False)


def load_codebook(path: Path, hashes: CodebookHashes = FROZEN) -> Tensor:
    """Return the points in the file, float32 ``[16, 256]`` on the CPU, exactly as stored.

    ValueError if there is no such file, or if the file or its numbers are not those of ``hashes``.
    """
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise ValueError(f"codebook {path} cannot be read ({error.strerror}): give the path of a file") from error
    _check_hash(f"codebook {path}", hashlib.sha256(packed).hexdigest(), hashes.file)
    try:
        points = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"codebook {path} holds no tensor: use the network's file") from error
    if not isinstance(points, Tensor) or tuple(points.shape) != _SHAPE:
        raise ValueError(f"codebook {path} holds no tensor of shape {list(_SHAPE)}: use the network's file")
    points = points.to(torch.float32).contiguous()
    _check_hash(f"the numbers in codebook {path}", numbers_hash(points), hashes.numbers)
    return points


def numbers_hash(points: Tensor) -> str:
    """Return the SHA-256 of the points' float32 numbers, row by row in little endian, in hex."""
    return hashlib.sha256(points.numpy().astype("<f4").tobytes()).hexdigest()


def rebuild_codebook() -> Tensor:
    """Make points by the network's recipe: float32 ``[16, 256]``, within 1e-5 of those of other builds of PyTorch.

    Halton points, pushed apart by 500 steps of Adam on the sum of the inverse squared distances of all ordered pairs.
    """
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.device("cpu"):
        free = _halton_points().requires_grad_()
        optimizer = torch.optim.Adam([free], lr=_LEARNING_RATE)
        others = ~torch.eye(CODEBOOK_POINTS, dtype=torch.bool)
        for _ in range(_REBUILD_STEPS):
            optimizer.zero_grad()
            points = normalise(free)
            squares = (points.unsqueeze(0) - points.unsqueeze(1)).square().sum(dim=-1)
            (1 / (squares[others] + _TINY)).sum().backward()
            optimizer.step()
        return normalise(free.detach())


def _halton_points() -> Tensor:
    rows = [
        [_radical_inverse(point, _PRIMES[coordinate % len(_PRIMES)]) for coordinate in range(PICKED_COORDINATES)]
        for point in range(1, CODEBOOK_POINTS + 1)
    ]
    return normalise(torch.tensor(rows, dtype=torch.float32).clamp(0.01, 0.99).logit())


def _radical_inverse(number: int, base: int) -> float:
    value, scale = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        scale /= base
        value += digit * scale
    return value


def _check_hash(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError(f"{what} has the SHA-256 {found}, not {wanted}: use the network's file")
