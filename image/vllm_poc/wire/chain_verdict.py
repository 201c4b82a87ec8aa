# SPDX-License-Identifier: Apache-2.0
"""The verdict on chains of the decode scheme, from the comparison of each nonce.

A pod compares, since it repeats each step with the prover's index of the step before. Who splits a request over several
pods puts their comparisons together here.
"""

from collections.abc import Iterable, Sequence

from pydantic import Field

from vllm_poc.wire.messages import Nonce, WireMessage
from vllm_poc.wire.stat_test import (
    ArtifactVerdict,
    ChainComparison,
    StatTest,
    allows_verdict,
    most_missing,
    tau_warning,
)


class NonceVerdict(WireMessage):
    """How a nonce's chain compares with the claim, and whether it mismatches."""

    nonce: Nonce
    n_sphere_mismatches: int = Field(ge=0)
    n_steps: int = Field(ge=0)
    mismatch_margin_max: float = Field(ge=0)
    mismatch: bool

    @classmethod
    def of(cls, nonce: int, found: ChainComparison, tau: float) -> "NonceVerdict":
        """Return what a comparison says of a nonce."""
        return cls(
            nonce=nonce,
            n_sphere_mismatches=found.n_disagreements,
            n_steps=found.n_steps,
            mismatch_margin_max=found.margin_max,
            mismatch=found.is_mismatch(tau),
        )


class NoVerdictError(ValueError):
    """Too few of the nonces could be compared: there is no vote."""


def chain_verdict(nonces: Sequence[int], compared: Iterable[NonceVerdict], test: StatTest) -> ArtifactVerdict:
    """Return the verdict over those of ``nonces`` that were compared; the others leave the sample.

    `NoVerdictError` if they are too many, or all.
    """
    found = {one.nonce: one for one in compared if one.n_steps > 0}
    excluded = [nonce for nonce in nonces if nonce not in found]
    total = len(nonces) - len(excluded)
    if not allows_verdict(requested=len(nonces), compared=total):
        most = min(most_missing(len(nonces)), len(nonces) - 1)
        raise NoVerdictError(
            f"validation aborted: {len(excluded)} of {len(nonces)} nonces could not be compared, and at most {most} "
            "may: look at the GPUs and the log of the pods that computed them"
        )
    mismatches = [nonce for nonce in nonces if nonce in found and found[nonce].mismatch]
    return ArtifactVerdict.of(
        test,
        mismatches,
        total,
        excluded,
        n_excluded=len(excluded),
        excluded_nonces=excluded,
        warning=tau_warning(test.dist_threshold),
    )
