# SPDX-License-Identifier: Apache-2.0
"""What pods compute for a self-check, and who of them computes something else than the others.

All pods compute the same nonces of a block that is none. Vectors are compared as the network compares those of a
prover: by the number of nonces whose vectors lie too far apart, and how likely so many are for an honest pod.
"""

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from poc_operator.apis.v1alpha1.validation import Thresholds
from vllm_poc.wire.answers import ModelLimits
from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse
from vllm_poc.wire.messages import DEFAULT_BATCH_SIZE, ArtifactParams
from vllm_poc.wire.stat_test import p_value

#: Block and key of all self-checks: SHA-256 of "vllm-poc-operator self-check", and a key that nobody has.
BLOCK_HASH = "0502019e1dd603c788ed1a802914f09e8ae80442f1284741c0c9c94a543be8eb"
PUBLIC_KEY = "vllm-poc-operator-self-check"
#: Answers that are tried as the one with which most others agree. Where most agree, nearly every second one is.
_CANDIDATES = 50

#: One vector for each nonce; None where it had no finite result.
Vectors = Sequence[Sequence[float] | None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a pod is to compute. ``model`` is what vLLM loads: a hub id or path, and its revision if one is named."""

    model: str
    seq_len: int
    k_dim: int
    nonces: int

    @cached_property
    def name(self) -> str:
        """Says what is computed. Vectors of two checks can be compared if their names are the same."""
        return " ".join([self.model, *(f"{name}={value}" for name, value in self._facts[1:])])

    def unlike(self, other: "Check") -> str:
        """Say in what this check is another one."""
        return " ".join(f"{name}={mine}" for name, mine in self._facts if (name, mine) not in other._facts)

    @property
    def _facts(self) -> Sequence[tuple[str, str | int]]:
        numbers = [("seqLen", self.seq_len), ("kDim", self.k_dim), ("nonces", self.nonces)]
        return [("model", self.model), *numbers]

    def request(self, served: str, *, beside_round: bool) -> GenerateRequest:
        """Ask a pod that serves the model under this name, and wait for the answer."""
        return GenerateRequest(
            block_hash=BLOCK_HASH,
            block_height=0,
            public_key=PUBLIC_KEY,
            nonces=list(range(self.nonces)),
            params=ArtifactParams(model=served, seq_len=self.seq_len, k_dim=self.k_dim),
            wait=True,
            beside_round=beside_round,
        )

    def batch(self, model: ModelLimits) -> int:
        """Return how many nonces a forward pass has that was not tuned; 0 if the pod does not tell its limits."""
        fitting = min(model.max_batch_nonces, model.max_batch_tokens // self.seq_len)
        # One nonce is computed in any case, unless earlier limits refuse it.
        return min(self.nonces, DEFAULT_BATCH_SIZE, max(1, fitting)) if model.max_batch_tokens else 0

    def vectors(self, answer: GeneratedResponse | ValidatedResponse) -> Vectors:
        """Return what a pod answered. ValueError if it is no answer to the request."""
        found = (answer.artifacts if isinstance(answer, GeneratedResponse) else None) or []
        vectors: dict[int, Sequence[float] | None] = {
            item["nonce"]: decode_vector(item["vector_b64"], self.k_dim) for item in found
        }
        vectors |= dict.fromkeys(answer.not_computed)
        if vectors.keys() != set(range(self.nonces)):
            raise ValueError(f"its answer is not about the {self.nonces} nonces that it was asked for")
        return [vectors[nonce] for nonce in range(self.nonces)]


def packed(vectors: Vectors, k_dim: int) -> str:
    """Return vectors as text: base64 of their fp16 numbers, NaN for those that were not computed."""
    missing = [math.nan] * k_dim
    numbers = [number for vector in vectors for number in (missing if vector is None else vector)]
    return base64.b64encode(struct.pack(f"<{len(numbers)}e", *numbers)).decode()


def unpacked(text: str, k_dim: int) -> Vectors:
    """Return the vectors of a text as `packed` makes it. ValueError if it is none."""
    data = base64.b64decode(text, validate=True)
    if not data or len(data) % (2 * k_dim):
        raise ValueError(f"{len(data)} bytes are not vectors of {k_dim} fp16 numbers: each takes {2 * k_dim}")
    vectors = struct.iter_unpack(f"<{k_dim}e", data)
    return [vector if all(map(math.isfinite, vector)) else None for vector in vectors]


def lacks(vectors: Vectors) -> int:
    """Return how many nonces had no finite result."""
    return sum(vector is None for vector in vectors)


def is_incomplete(vectors: Vectors) -> bool:
    """Whether so many nonces lack a result that the network gives no verdict: more than a tenth, and more than one."""
    return lacks(vectors) > max(1, len(vectors) // 10)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How vectors compare with the reference: how many of ``total`` mismatch, and how likely that is for honest ones.

    ``farthest`` is the largest L2 distance, ``threshold`` that beyond which two vectors mismatch, and ``failed`` says
    that the network would call it fraud.
    """

    mismatches: int
    total: int
    farthest: float
    threshold: float
    p_value: float
    failed: bool


def compare(vectors: Vectors, reference: Vectors, thresholds: Thresholds) -> Comparison:
    """Put vectors to the network's test. Nonces without a result on either side leave the sample."""
    both = [(one, other) for one, other in zip(vectors, reference, strict=True) if one and other]
    distances = [math.dist(one, other) for one, other in both]
    mismatches = sum(distance > thresholds.dist_threshold for distance in distances)
    probability = p_value(mismatches, len(both), thresholds.p_mismatch)
    return Comparison(
        mismatches=mismatches,
        total=len(both),
        farthest=max(distances, default=0.0),
        threshold=thresholds.dist_threshold,
        p_value=probability,
        failed=probability < thresholds.p_value_threshold,
    )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The comparison of each pod with the reference. ``source`` is the pod whose vectors have become the reference
    now; None if it stays what it was."""

    reference: Vectors
    source: str | None
    results: Mapping[str, Comparison]


def judge(
    answers: Mapping[str, Vectors],
    reference: Vectors | None,
    thresholds: Thresholds,
    *,
    standing: int = 0,
    fixed: bool = False,
) -> Judgement:
    """Compare pods' vectors with the reference, and with each other where most of them disagree with it.

    Vectors with which more than half of the pods agree become the reference, if it disagrees with them and is not
    ``fixed``. Without a reference the first pod's vectors become it, unless most pods agree on others. ``standing`` is
    the number of further pods that agree with the reference. There must be an answer; none may be incomplete.
    """
    source: str | None = None
    if reference is None:
        source = _agreed(answers, list(answers), len(answers), thresholds) or min(answers)
        reference = answers[source]
    elif not fixed:
        differing = [pod for pod, vectors in answers.items() if compare(vectors, reference, thresholds).failed]
        source = _agreed(answers, differing, len(answers) + standing, thresholds)
        reference = answers[source] if source is not None else reference
    results = {pod: compare(vectors, reference, thresholds) for pod, vectors in answers.items()}
    return Judgement(reference=reference, source=source, results=results)


def _agreed(answers: Mapping[str, Vectors], candidates: Sequence[str], pods: int, thresholds: Thresholds) -> str | None:
    """Return the first of the candidates with whose vectors more than half of all pods agree, two at least."""
    if 2 * len(candidates) <= pods or len(candidates) < 2:  # noqa: PLR2004 - two can agree
        return None
    step = -(-len(candidates) // _CANDIDATES)
    for candidate in sorted(candidates)[::step]:
        vectors = answers[candidate]
        agreeing = sum(not compare(other, vectors, thresholds).failed for other in answers.values())
        if 2 * agreeing > pods:
            return candidate
    return None
