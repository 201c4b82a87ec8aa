# SPDX-License-Identifier: Apache-2.0
"""The parts of ``spec`` that are about named nonces: proofs to check, a rate to calibrate, pods to compare."""

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from poc_operator.model.base import ApiModel, Decimal
from vllm_poc.wire.messages import Nonce, Protocol


class Proof(ApiModel):
    """What a prover claims for one nonce: a ``vector`` (base64, fp16) or a ``distance``, as the protocol has it."""

    nonce: Nonce
    vector: str | None = None
    distance: Decimal | None = None


class ConfigMapKey(ApiModel):
    """An entry of a ConfigMap in the round's namespace: a JSON list of proofs."""

    name: str
    key: str = "proofs.json"


class RoundSample(ApiModel):
    """Results of another round of the namespace, as the gateway picks them by ``seed``."""

    name: str
    nonces: int = 200
    seed: str = ""


class ProofsSpec(ApiModel):
    """The proofs that a Validate round recomputes; exactly one field is set."""

    inline: list[Proof] | None = None
    config_map: ConfigMapKey | None = None
    round: RoundSample | None = None


class FraudSpec(ApiModel):
    """When proofs count as fraud; `vllm_poc.wire.stat_test` has the test."""

    dist_threshold: Decimal = "0.02"
    p_mismatch: Decimal = "0.001"
    fraud_threshold: Decimal = "0.01"


class CalibrationSpec(ApiModel):
    """Which share of nonces is to be valid, and how many are measured to find the ``rTarget`` for it."""

    valid_rate: Decimal
    nonces: int = 2000


class CrossCheckSpec(ApiModel):
    """How often the pods of a round recompute the same nonces, how many, and how far they may differ.

    ``max_difference`` is the L2 distance of artifacts, 0.2 unless told otherwise, or the difference of
    distances, 0.002 unless told otherwise.
    """

    sample_every: int = 300
    nonces: int = 8
    max_difference: Decimal | None = None


_PROOFS = TypeAdapter(list[Proof])


def parse_proofs(where: str, text: str | bytes | None, protocol: Protocol) -> Sequence[Proof] | str:
    """Return the proofs in ``text``, or what is wrong with it; ``where`` says where it stands."""
    if text is None:
        return f"{where} does not exist: put a JSON list of proofs there"
    try:
        proofs = _PROOFS.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{where} is not a JSON list of proofs: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return _flaw(where, proofs, protocol) or proofs


def _flaw(where: str, proofs: Sequence[Proof], protocol: Protocol) -> str | None:
    if not proofs:
        return f"{where} has no proof"
    field = "vector" if protocol is Protocol.ARTIFACT else "distance"
    lacking = next((proof for proof in proofs if getattr(proof, field) is None), None)
    if lacking is not None:
        return f"{where}: nonce {lacking.nonce} has no {field}, which the round's protocol needs"
    if len({proof.nonce for proof in proofs}) < len(proofs):
        return f"{where} names a nonce twice"
    return None
