# SPDX-License-Identifier: Apache-2.0
"""What is refused before work begins: deployments that PoC cannot run in, and requests beyond the model's limits.

Each check of a request raises a RefusalError.
"""

from collections.abc import Mapping, Set
from http import HTTPStatus
from urllib.parse import urlsplit

from vllm_poc.rpc import ModelFacts
from vllm_poc.server.errors import field_refusal, refusal
from vllm_poc.server.settings import Settings
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ArtifactParams, CallbackRequest, RoundRequest

#: How many nonces a message names.
_NAMED = 5
# Options of vLLM that make several API servers or engines, with the values that do not.
_SEVERAL: Mapping[str, tuple[object, ...]] = {
    "api_server_count": (None, 1),
    "data_parallel_size": (None, 1),
    "data_parallel_size_local": (None, 1),
    "data_parallel_rank": (None,),
    "data_parallel_start_rank": (None,),
    "data_parallel_hybrid_lb": (None, False),
    "data_parallel_external_lb": (None, False),
    "data_parallel_multi_port_external_lb": (None, False),
}


def deployment_refusal(arguments: object, environment: Mapping[str, str]) -> str | None:
    """Return one sentence that names the option and the remedy, or None; ``arguments`` are vLLM's, parsed."""
    culprits = [
        f"--{name.replace('_', '-')}"
        for name, harmless in _SEVERAL.items()
        if getattr(arguments, name, None) not in harmless
    ]
    if environment.get("VLLM_DP_SIZE", "1") != "1":
        culprits.append("VLLM_DP_SIZE")
    if not culprits:
        return None
    # Each API server would have a round of its own, and each engine would compute the same nonces.
    return f"PoC needs one API server with one engine: leave {culprits[0]} out, and start several pods instead."


def check_round(request: RoundRequest, facts: ModelFacts, served_names: frozenset[str]) -> None:
    """Refuse what the model does not allow: 409 for another model, 422 for a number beyond a limit."""
    if facts["refusal"] is not None:
        raise refusal(HTTPStatus.CONFLICT, "ModelUnsupported", facts["refusal"])
    _check_seq_len(request, facts)
    if request.params is not None:
        _check_params(request.params, facts, served_names)


def check_callback(request: CallbackRequest, settings: Settings) -> None:
    """Refuse a callback to a host outside the allow list with 422."""
    host = urlsplit(request.receiver or "").hostname
    if host is not None and not settings.allows_callback_to(host):
        field = "url" if request.url is not None else "callback_url"
        allowed = ", ".join(settings.callback_allow)
        raise field_refusal(field, f"callbacks to {host} are not allowed; VLLM_POC_CALLBACK_ALLOW allows {allowed}")


def check_validation(request: GenerateRequest) -> None:
    """Refuse with 400 artifacts that are not of exactly the request's nonces."""
    missing, foreign = request.unmatched()
    if missing or foreign:
        message = (
            "must have one artifact for each of nonces and no other: "
            f"{_some(missing)} missing, {_some(foreign)} not in nonces"
        )
        raise field_refusal("validation.artifacts", message, status=HTTPStatus.BAD_REQUEST)


def slice_limit(request: RoundRequest, facts: ModelFacts) -> int:
    """Return how many nonces a forward pass holds that is not tuned: at least 1."""
    return min(request.batch_size, most_nonces(request, facts))


def most_nonces(request: RoundRequest, facts: ModelFacts) -> int:
    """Return how many nonces one forward pass may hold: at least 1."""
    return max(1, min(facts["max_batch_nonces"], facts["max_batch_tokens"] // request.effective_seq_len))


def _check_seq_len(request: RoundRequest, facts: ModelFacts) -> None:
    field = "params.seq_len" if request.params is not None else "seq_len"
    limits = {"max_model_len": facts["max_model_len"], "max_batch_tokens": facts["max_batch_tokens"]}
    for limit, allowed in limits.items():
        if request.effective_seq_len > allowed:
            message = f"{request.effective_seq_len} exceeds the server's {limit} of {allowed}"
            raise field_refusal(field, message, reason="SequenceTooLong")


def _check_params(params: ArtifactParams, facts: ModelFacts, served_names: frozenset[str]) -> None:
    if params.model not in served_names:
        served = ", ".join(sorted(served_names))
        raise refusal(
            HTTPStatus.CONFLICT,
            "ModelMismatch",
            f"params.model: {params.model} was requested, but this server serves {served}",
        )
    if params.k_dim > facts["hidden_size"]:
        raise field_refusal("params.k_dim", f"{params.k_dim} exceeds the hidden size of {facts['hidden_size']}")


def _some(nonces: Set[int]) -> str:
    if not nonces:
        return "none"
    named = ", ".join(str(nonce) for nonce in sorted(nonces)[:_NAMED])
    return f"{named} and {len(nonces) - _NAMED} more" if len(nonces) > _NAMED else named
