# SPDX-License-Identifier: Apache-2.0
"""The statistical test for fraud: its thresholds, its formula and its outcome.

A nonce mismatches if its received and its recomputed vector lie further apart than a threshold. An honest
prover mismatches with probability p each time, so the number of mismatches is binomial, and the p-value is
the probability of at least as many.

In the decode scheme a nonce has a chain of indices. A validator repeats each step with the prover's index of the step
before. Where its own index differs from the claim, the margin says by how much the claimed point scores below its best.
Honest servers differ near the border of two points only, so a nonce mismatches if its largest such margin exceeds a
threshold, tau.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from pydantic import Field

from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.messages import Probability, ShortText, SlotRequest, WireMessage

# Below this share of the sum, later and ever smaller terms no longer change its digits.
_NEGLIGIBLE = 1e-18
#: Margin of a claim that is no index; those of indices are below.
OUT_OF_RANGE_MARGIN = 2.0
#: Tau of a request without ``stat_test``. One that only leaves out ``dist_threshold`` gets that field's default.
DEFAULT_TAU = 0.025
#: What the network's nodes send as ``dist_threshold`` where the chain has none. No honest tau is as large.
UNSET_DIST_THRESHOLD = 0.4


class StatTest(WireMessage):
    """When received artifacts count as fraud."""

    #: L2 distance beyond which two vectors mismatch.
    dist_threshold: float = Field(default=0.02, ge=0)
    #: Probability that an honest prover's nonce mismatches.
    p_mismatch: Probability = 0.001
    #: A p-value strictly below is fraud.
    fraud_threshold: Probability = 0.01
    #: The chain's name for it. The reference ignores the name, so that the whole network judges by
    #: ``fraud_threshold``: a pod does the same, since one that judges otherwise votes against honest provers.
    p_value_threshold: Probability | None = None


class Verdict(WireMessage):
    """The fraud test's outcome over ``n_total`` nonces, which leaves out those that were not computed.

    ``not_computed`` names these: their result was NaN or infinite on this server.
    """

    n_total: int
    n_mismatch: int
    mismatch_nonces: list[int]
    p_value: float
    fraud_detected: bool
    # Ours.
    not_computed: list[int]

    @classmethod
    def of(
        cls,
        test: StatTest | SlotRequest,
        mismatches: list[int],
        n_total: int,
        not_computed: list[int],
        **others: Any,  # noqa: ANN401 - those of a subclass
    ) -> Self:
        """Return the outcome for these mismatches of ``n_total`` nonces; ``others`` are further fields.

        ValueError as for `p_value`.
        """
        probability = p_value(len(mismatches), n_total, test.p_mismatch)
        return cls(
            n_total=n_total,
            n_mismatch=len(mismatches),
            mismatch_nonces=mismatches,
            p_value=probability,
            fraud_detected=probability < test.fraud_threshold,
            not_computed=not_computed,
            **others,
        )


class ArtifactVerdict(Verdict):
    """The outcome for artifacts. In the decode scheme it names those of ``not_computed`` by the network's words, too.

    ``warning`` says for people what makes the verdict worth little.
    """

    n_excluded: int | None = None
    excluded_nonces: list[int] | None = None
    # Ours.
    warning: ShortText | None = None


def is_mismatch(computed: Sequence[float], received_b64: str, dist_threshold: float) -> bool:
    """Whether the received vector lies strictly further than ``dist_threshold`` (L2) from ``computed``.

    A received text that does not decode to as many finite numbers is a mismatch. ``computed`` is
    the decoded fp16 vector; ValueError if it is not finite, since such a nonce leaves the sample.
    """
    if not all(math.isfinite(value) for value in computed):
        raise ValueError("the recomputed vector is not finite: leave its nonce out of the sample")
    try:
        received = decode_vector(received_b64, len(computed))
    except ValueError:
        return True
    return math.dist(computed, received) > dist_threshold


def is_distance_mismatch(received: float, computed: float, r_target: float) -> bool:
    """Whether the claimed or the computed distance of a nonce that was claimed valid is not below ``r_target``."""
    return max(received, computed) >= r_target


class ChainComparison(NamedTuple):
    """How a nonce's chain compares with the claimed one, over the steps that both have."""

    n_steps: int
    n_disagreements: int
    #: Largest margin of a disagreeing step, 0 if there is none.
    margin_max: float

    def is_mismatch(self, tau: float) -> bool:
        """Whether some step disagrees and the largest margin lies strictly above ``tau``."""
        return self.n_disagreements > 0 and self.margin_max > tau


def compare_chain(points: Sequence[int], margins: Sequence[float], claims: Sequence[int]) -> ChainComparison | None:
    """Compare a recomputed chain with the claimed one, step by step; the longer one's other steps do not count.

    ``margins`` runs parallel to ``points`` and may lack the steps without a claim. Returns None for a chain with a
    step that was not finite (-1): such a nonce leaves the sample.
    """
    if any(point < 0 for point in points):
        return None
    compared = min(len(points), len(claims))
    if len(margins) < compared:
        raise ValueError(f"margins has {len(margins)} steps, but {compared} are compared: give one for each")
    apart = [step for step in range(compared) if points[step] != claims[step]]
    return ChainComparison(compared, len(apart), max((margins[step] for step in apart), default=0.0))


def most_missing(requested: int) -> int:
    """Return how many of the requested nonces may lack a comparison for the rest to get a verdict."""
    return max(1, requested // 10)


def allows_verdict(*, requested: int, compared: int) -> bool:
    """Whether enough of the requested nonces were compared, and at least one."""
    return compared > 0 and requested - compared <= most_missing(requested)


def effective_test(stat_test: StatTest | None) -> StatTest:
    """Return the test of a request of the decode scheme, whose ``dist_threshold`` is tau."""
    return StatTest(dist_threshold=DEFAULT_TAU) if stat_test is None else stat_test


def effective_tau(stat_test: StatTest | None) -> float:
    """Return the threshold of a request's test, or of a request without one."""
    return effective_test(stat_test).dist_threshold


def tau_warning(tau: float) -> str | None:
    """Say so if a tau is so large that it looks like the default of vectors: hardly any claim mismatches then."""
    if tau < UNSET_DIST_THRESHOLD:
        return None
    return (
        f"stat_test.dist_threshold is {tau:g}, which looks like the default of vectors: hardly any wrong chain exceeds "
        "it. Set the chain's stat_test for the decode scheme"
    )


def p_value(n_mismatch: int, n_total: int, p_mismatch: float) -> float:
    """Return P(X >= n_mismatch) for X ~ Binomial(n_total, p_mismatch), to about 9 digits.

    1.0 for an empty sample. ValueError unless 0 <= n_mismatch <= n_total and 0 <= p_mismatch <= 1.
    """
    if not 0 <= n_mismatch <= n_total:
        raise ValueError(f"n_mismatch {n_mismatch} must lie in 0..n_total, which is {n_total}")
    if not 0 <= p_mismatch <= 1:
        raise ValueError(f"p_mismatch {p_mismatch} must lie in 0..1")
    if n_mismatch == 0:
        return 1.0
    if p_mismatch in (0.0, 1.0):
        return p_mismatch
    log_p, log_q = math.log(p_mismatch), math.log1p(-p_mismatch)
    if n_mismatch > n_total * p_mismatch:
        return _tail(n_mismatch, n_total, log_p, log_q)
    # Below the mean the other tail is the small one: X < k is n - X >= n - k + 1.
    return 1.0 - _tail(n_total - n_mismatch + 1, n_total, log_q, log_p)


def is_fraud(n_mismatch: int, n_total: int, *, p_mismatch: float, fraud_threshold: float) -> bool:
    """Whether the p-value lies strictly below ``fraud_threshold``. Errors as for `p_value`."""
    return p_value(n_mismatch, n_total, p_mismatch) < fraud_threshold


def _tail(k: int, n: int, log_p: float, log_q: float) -> float:
    # P(X >= k) for k above the mean: the terms shrink from the first on, each from the one before.
    odds = math.exp(log_p - log_q)
    term = math.exp(_log_choose(n, k) + k * log_p + (n - k) * log_q)
    terms: list[float] = []
    while term > _NEGLIGIBLE * (terms[0] if terms else 0.0):
        terms.append(term)
        term *= (n - k) / (k + 1) * odds
        k += 1
    return math.fsum(terms)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
