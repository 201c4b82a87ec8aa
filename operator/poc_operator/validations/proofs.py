# SPDX-License-Identifier: Apache-2.0
"""Lists of proofs, as they stand in ConfigMaps and in the gateway's answers."""

import hashlib
import json
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from poc_operator.apis.v1alpha1.validation import Proof
from vllm_poc.wire.messages import Protocol

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
        return f"{where}: nonce {lacking.nonce} has no {field}, which the validation's protocol needs"
    if len({proof.nonce for proof in proofs}) < len(proofs):
        return f"{where} names a nonce twice"
    return None


def in_order(proofs: Sequence[Proof]) -> Sequence[Proof]:
    """Return the proofs by nonce: to the API server, proofs in another order are the same."""
    return sorted(proofs, key=lambda proof: proof.nonce)


def digest(proofs: Sequence[Proof]) -> str:
    """Return the SHA-256 of the proofs, by which a later change is noticed."""
    return hashlib.sha256(json.dumps([proof.model_dump() for proof in proofs]).encode()).hexdigest()
