# SPDX-License-Identifier: Apache-2.0
"""Results in the words of the protocols: callback payloads and answers."""

from collections.abc import Sequence
from typing import Any, TypeVar

from vllm_poc.server.callbacks.delivery import shown
from vllm_poc.server.scheduler import ComputedChain, Item, distance_of
from vllm_poc.wire.answers import RoundConfig
from vllm_poc.wire.artifacts import Artifact, Encoding, chain_artifact
from vllm_poc.wire.callbacks import GeneratedArtifacts, GeneratedDistances, ValidatedArtifacts
from vllm_poc.wire.generate import Completed, GeneratedResponse, GenerateRequest, ValidatedResponse
from vllm_poc.wire.messages import RoundRequest, SlotRequest, WireMessage, scheme_of

Items = Sequence[Item]
C = TypeVar("C", bound=Completed)
#: Of an artifact whose chain was compared with nothing.
_NOT_COMPARED = -1


def valid_items(request: RoundRequest, items: Items) -> list[Item]:
    """Return the items that count: all artifacts; distances strictly below ``r_target``."""
    r_target = request.r_target
    if r_target is None:
        return list(items)
    return [(nonce, value) for nonce, value in items if distance_of(value) < r_target]


def callback(
    request: SlotRequest | GenerateRequest, items: Items, request_id: str | None = None, *, rebuilt: bool = False
) -> WireMessage:
    """Return the ``/generated`` payload that delivers valid items; ``rebuilt`` as for `with_codebook`."""
    common = _round_fields(request) | {"node_id": request.node_id, "request_id": request_id}
    if request.params is not None:
        encoding = Encoding(k_dim=request.params.k_dim)
        said = _said(rebuilt=rebuilt)
        return GeneratedArtifacts(artifacts=_artifacts(items), encoding=encoding, **common, **said)
    assert request.r_target is not None  # noqa: S101 - one of the two is set, by validation
    return GeneratedDistances(nonces=_nonces(items), dist=_distances(items), r_target=request.r_target, **common)


def verdict_callback(request: GenerateRequest, result: ValidatedResponse) -> ValidatedArtifacts:
    """Return the ``/validated`` payload of queued work."""
    return ValidatedArtifacts(node_id=request.node_id, **_round_fields(request), **result.model_dump())


def generated(request: GenerateRequest, items: Items, request_id: str) -> GeneratedResponse:
    """Return the answer to ``generate``. Nonces whose result is not finite are only named."""
    computed = set(_nonces(items))
    missing = [nonce for nonce in request.nonces if nonce not in computed]
    if request.params is not None:
        encoding = Encoding(k_dim=request.params.k_dim)
        artifacts = _compared(items)
        return GeneratedResponse(request_id=request_id, not_computed=missing, artifacts=artifacts, encoding=encoding)
    valid = valid_items(request, items)
    return GeneratedResponse(
        request_id=request_id,
        not_computed=missing,
        nonces=_nonces(items),
        distances=_distances(items),
        total_checked=len(items),
        total_valid=len(valid),
        valid_nonces=_nonces(valid),
        valid_distances=_distances(valid),
    )


def with_codebook(result: C, *, rebuilt: bool) -> C:
    """Return the answer; if the codebook was ``rebuilt``, so that it is not the network's, the answer says so."""
    return result.model_copy(update=_said(rebuilt=rebuilt))


def callback_items(result: GeneratedResponse) -> list[Item]:
    """Return what a result's callbacks deliver: all artifacts, or the valid distances."""
    if result.artifacts is None:
        return list(zip(result.valid_nonces or [], result.valid_distances or [], strict=True))
    if result.artifacts and "k_points_steps" in result.artifacts[0]:  # so have all of them
        return [
            (artifact["nonce"], ComputedChain(bytes(artifact["k_points_steps"] or []), None))
            for artifact in result.artifacts
        ]
    return [(artifact["nonce"], artifact["vector_b64"]) for artifact in result.artifacts]


def round_config(request: SlotRequest) -> RoundConfig:
    """Return the round as status tells it: as requested, with the defaults that depend on its protocol."""
    params = request.params.model_dump() if request.params is not None else {}
    in_effect = {
        "protocol": request.protocol,
        "scheme": scheme_of(request.protocol),
        "seq_len": request.effective_seq_len,
        "url": shown(request.receiver) if request.receiver is not None else None,
        "use_layer_hooks": request.layer_hooks,
        "use_sign_flips": request.sign_flips,
    }
    return RoundConfig.model_validate(request.model_dump() | params | in_effect)


def _artifacts(items: Items) -> list[Artifact]:
    return [
        chain_artifact(nonce, value.leaf)
        if isinstance(value, ComputedChain)
        else Artifact(nonce=nonce, vector_b64=str(value))
        for nonce, value in items
    ]


def _compared(items: Items) -> list[Artifact]:
    """Return the artifacts as ``generate`` answers them: chains with how they compare with the reference, if any."""
    artifacts = _artifacts(items)
    for artifact, (_, value) in zip(artifacts, items, strict=True):
        if isinstance(value, ComputedChain):
            found = value.compared
            artifact["n_sphere_mismatches"] = found.n_disagreements if found is not None else _NOT_COMPARED
            artifact["n_nan_steps"] = 0  # the others are not computed
            artifact["mismatch_margin_max"] = found.margin_max if found is not None else 0.0
    return artifacts


def _said(*, rebuilt: bool) -> dict[str, Any]:
    return {"rebuilt_codebook": True} if rebuilt else {}


def _nonces(items: Items) -> list[int]:
    return [nonce for nonce, _ in items]


def _distances(items: Items) -> list[float]:
    return [distance_of(value) for _, value in items]


def _round_fields(request: RoundRequest) -> dict[str, Any]:
    return request.model_dump(include={"public_key", "block_hash", "block_height"})
