# SPDX-License-Identifier: Apache-2.0
"""What is made of computed nonces: the answer, and the callbacks that say the same.

The fraud test is put to all nonces of a request together, whichever pods computed them. Its thresholds are the
request's. Those that it does not have are the settings' for the model, and else the network's.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from http import HTTPStatus

from poc_gateway.errors import Refusal, field_refusal
from poc_gateway.settings import Settings
from vllm_poc.wire.artifacts import Artifact, Encoding, decode_vector
from vllm_poc.wire.callbacks import GeneratedArtifacts, GeneratedDistances, ValidatedArtifacts
from vllm_poc.wire.chain_verdict import NonceVerdict, NoVerdictError, chain_verdict
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse
from vllm_poc.wire.messages import Protocol, WireMessage
from vllm_poc.wire.stat_test import StatTest, effective_tau, is_mismatch, p_value

#: By nonce: a vector as base64, a distance, how a chain compares, or None where the pod had no finite result.
Values = Mapping[int, str | float | NonceVerdict | None]
Result = GeneratedResponse | ValidatedResponse


#: The network's own distances by model, artifacts of 12 numbers; the last is for all others. The chain has 0.75 and
#: 0.4, the others are planned (parameters as of 2026-09).
NETWORK_DISTANCES = {
    "*minimax-m2.7*": 0.75,
    "*deepseek-v4-flash*": 0.41,
    "*glm-5.3-flash*": 0.44,
    "*": 0.4,
}
#: The network's share of an honest prover's nonces that mismatch; and the reference's threshold of the p-value, which
#: ignores the chain's.
NETWORK_P_MISMATCH, REFERENCE_FRAUD_THRESHOLD = 0.1, 0.01


def stat_test_of(request: GenerateRequest, settings: Settings) -> StatTest:
    """Return the fraud test of a validation: from the request, else from the settings, else the network's.

    The chain's ``p_value_threshold`` takes the place of a missing ``fraud_threshold`` if the settings say so. The
    distances of the settings and of the network are those of vectors: without one of its own, a request of the decode
    scheme has the tau that a pod would take.
    """
    told = request.stat_test.model_dump(exclude_unset=True) if request.stat_test is not None else {}
    chains = told.pop("p_value_threshold", None)
    model = request.params.model.lower() if request.params is not None else ""
    distance = next(value for pattern, value in NETWORK_DISTANCES.items() if fnmatchcase(model, pattern))
    network = {
        "dist_threshold": distance,
        "p_mismatch": NETWORK_P_MISMATCH,
        "fraud_threshold": REFERENCE_FRAUD_THRESHOLD,
    }
    if settings.p_value_threshold == "apply" and chains is not None:
        told = {"fraud_threshold": chains} | told
    patterns = (one for pattern, one in settings.stat_tests.items() if fnmatchcase(model, pattern.lower()))
    configured = next((one.model_dump(exclude_unset=True) for one in patterns), {})
    if request.protocol is Protocol.DECODE:
        configured["dist_threshold"] = effective_tau(request.stat_test)
    return StatTest.model_validate(network | configured | told)


def check_validation(request: GenerateRequest) -> None:
    """Refuse with 400 artifacts that are not of exactly the request's nonces, or have no chain to compare."""
    if unclaimed := request.unclaimed():
        message = f"must each have k_points_steps in the decode scheme: {len(unclaimed)} have none"
        raise field_refusal("validation.artifacts", message, status=HTTPStatus.BAD_REQUEST)
    missing, foreign = request.unmatched()
    if missing or foreign:
        message = (
            "must have one artifact for each of nonces and no other: "
            f"{len(missing)} are missing, {len(foreign)} are not in nonces"
        )
        raise field_refusal("validation.artifacts", message, status=HTTPStatus.BAD_REQUEST)


def result_of(request: GenerateRequest, request_id: str, values: Values) -> Result:
    """Return the answer; Refusal with 503 if there is no verdict, since no nonce, or too few, could be computed."""
    if request.protocol is Protocol.DECODE:
        return _verdict_on_chains(request, request_id, values)
    if request.validation is not None:
        return _verdict(request, request_id, values)
    missing = [nonce for nonce in request.nonces if values[nonce] is None]
    if request.params is not None:
        artifacts = [Artifact(nonce=nonce, vector_b64=str(values[nonce])) for nonce in _computed(request, values)]
        encoding = Encoding(k_dim=request.params.k_dim)
        return GeneratedResponse(request_id=request_id, not_computed=missing, artifacts=artifacts, encoding=encoding)
    distances = {nonce: float(str(values[nonce])) for nonce in _computed(request, values)}
    valid = {nonce: distance for nonce, distance in distances.items() if distance < (request.r_target or 0)}
    return GeneratedResponse(
        request_id=request_id,
        not_computed=missing,
        nonces=list(distances),
        distances=list(distances.values()),
        total_checked=len(distances),
        total_valid=len(valid),
        valid_nonces=list(valid),
        valid_distances=list(valid.values()),
    )


def callbacks_of(request: GenerateRequest, result: Result, payload_artifacts: int) -> list[tuple[str, WireMessage]]:
    """Return the callbacks of queued work, as (path below its URL, body)."""
    about = request.model_dump(include={"public_key", "block_hash", "block_height", "node_id"})
    if isinstance(result, ValidatedResponse):
        return [("/validated", ValidatedArtifacts.model_validate(result.model_dump() | about))]
    about["request_id"] = result.request_id
    if result.artifacts is not None and result.encoding is not None:
        found, encoding = result.artifacts, result.encoding
        parts = [found[start : start + payload_artifacts] for start in range(0, len(found), payload_artifacts)]
        return [("/generated", GeneratedArtifacts(artifacts=part, encoding=encoding, **about)) for part in parts]
    nonces, distances = result.valid_nonces or [], result.valid_distances or []
    return [
        (
            "/generated",
            GeneratedDistances(
                nonces=nonces[start : start + payload_artifacts],
                dist=distances[start : start + payload_artifacts],
                r_target=request.r_target or 0,
                **about,
            ),
        )
        for start in range(0, len(nonces), payload_artifacts)
    ]


def _computed(request: GenerateRequest, values: Values) -> list[int]:
    return [nonce for nonce in request.nonces if values[nonce] is not None]


def _verdict(request: GenerateRequest, request_id: str, values: Values) -> ValidatedResponse:
    assert request.validation is not None  # noqa: S101 - the caller looked
    assert request.params is not None  # noqa: S101 - by the request's own rules
    test, k_dim = request.stat_test or StatTest(), request.params.k_dim
    received = {artifact["nonce"]: artifact["vector_b64"] for artifact in request.validation.artifacts}
    computed = _computed(request, values)
    if not computed:
        detail = "no verdict: every nonce came out NaN or infinite on this cluster's pods; check their GPUs"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NothingComputed", detail)
    mismatches = [
        nonce
        for nonce in computed
        if is_mismatch(decode_vector(str(values[nonce]), k_dim), received[nonce], test.dist_threshold)
    ]
    probability = p_value(len(mismatches), len(computed), test.p_mismatch)
    return ValidatedResponse(
        request_id=request_id,
        n_total=len(computed),
        n_mismatch=len(mismatches),
        mismatch_nonces=mismatches,
        p_value=probability,
        fraud_detected=probability < test.fraud_threshold,
        not_computed=[nonce for nonce in request.nonces if values[nonce] is None],
    )


def _verdict_on_chains(request: GenerateRequest, request_id: str, values: Values) -> ValidatedResponse:
    compared = [one for nonce in request.nonces if isinstance(one := values[nonce], NonceVerdict)]
    try:
        verdict = chain_verdict(request.nonces, compared, request.stat_test or StatTest())
    except NoVerdictError as error:
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NothingComputed", str(error)) from error
    return ValidatedResponse(request_id=request_id, per_nonce=compared, **verdict.model_dump())
