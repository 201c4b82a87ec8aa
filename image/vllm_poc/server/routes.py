# SPDX-License-Identifier: Apache-2.0
"""The REST routes under ``/api/v1/pow``."""

import asyncio
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.security import HTTPBearer

from vllm_poc.server.bodies import BodyRoute, answer
from vllm_poc.server.errors import install_handlers, refusal
from vllm_poc.server.nvml import read_gpus
from vllm_poc.server.service import PocService
from vllm_poc.start_checks import vllm_version
from vllm_poc.wire.answers import (
    CommandResponse,
    ErrorResponse,
    GpusResponse,
    PowState,
    StatusResponse,
    VersionsResponse,
)
from vllm_poc.wire.client_gone import ClientGone, while_connected
from vllm_poc.wire.generate import (
    GeneratedResponse,
    GenerateRequest,
    JobResponse,
    ProofBatch,
    ProofVerdict,
    ValidatedResponse,
)
from vllm_poc.wire.messages import (
    API_PREFIX,
    ExtendRequest,
    InitGenerateRequest,
    InitRequest,
    LeaseRenewal,
    LeaseSeconds,
    RoundId,
    ShortText,
)

_MEANINGS = {
    400: "No round is configured, or the artifacts are not those of the nonces",
    401: "The token is missing or wrong, or the server has none and answers its own machine alone",
    404: "Unknown or expired",
    409: "Another round runs, or the server's model or protocol is another one",
    413: "The body is too large",
    415: "The body is no JSON, as its Content-Type says",
    422: "A field is wrong; `errors` names it",
    429: "Too many nonces are queued",
    503: "The engine is not ready or fails, the result was not done in time, or the server ends",
}
#: Every error has the same body.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": meaning} for status, meaning in _MEANINGS.items()
}
# The middleware checks the token; this documents it.
_BEARER = HTTPBearer(auto_error=False, description="PoC's token, or a key of vLLM's --api-key.")


router = APIRouter(prefix=API_PREFIX, responses=ERRORS, dependencies=[Depends(_BEARER)], route_class=BodyRoute)


_WITHOUT_NONE: dict[str, Any] = {"response_model_exclude_none": True}


async def _service(request: Request) -> PocService:  # FastAPI gives a plain function a thread for each request
    service: PocService = request.app.state.service
    return service


Service = Annotated[PocService, Depends(_service)]


@router.post("/init")
async def init(request: InitRequest, service: Service) -> CommandResponse:
    """Take over a distance round; `phase/generate` or `phase/validate` follows."""
    return await service.init(request, PowState.IDLE)


@router.post("/init/generate")
async def init_generate(request: InitGenerateRequest, service: Service) -> CommandResponse:
    """Start to compute the nonces of one slot. A repeat with the same `round_id` and content changes nothing."""
    return await service.start(request)


@router.post("/extend")
async def extend(request: ExtendRequest, service: Service) -> CommandResponse:
    """Let the round compute on, up to another `end_index`."""
    return await service.extend(request)


@router.post("/init/validate")
async def init_validate(request: InitRequest, service: Service) -> CommandResponse:
    """Take over a distance round and let it validate."""
    return await service.init(request, PowState.VALIDATING)


@router.post("/phase/generate")
async def phase_generate(service: Service) -> CommandResponse:
    """Generate the distance round on from what was delivered, to the same callback address."""
    return await service.resume()


@router.post("/phase/validate")
async def phase_validate(service: Service) -> CommandResponse:
    """Stop generating the distance round, deliver what is left, and let it validate."""
    return await service.validate_phase()


@router.post("/validate", response_model=ProofVerdict)
async def validate(batch: ProofBatch, service: Service) -> ProofVerdict | Response:
    """Recompute claimed distances for the configured round; the verdict also goes to `{callback}/validated`.

    `fraud_detected` is the binomial test over the nonces whose claim or recomputed distance is not below
    `r_target`; see `p_mismatch` and `fraud_threshold` of the init calls. Work goes on if the client goes away,
    since the callback's receiver waits for it too.
    """
    return await answer(await service.prove(batch))


@router.post("/generate", response_model=GeneratedResponse | ValidatedResponse | JobResponse, **_WITHOUT_NONE)
async def generate(
    body: GenerateRequest, service: Service, request: Request
) -> GeneratedResponse | ValidatedResponse | JobResponse | Response:
    """Compute named nonces, or compare received artifacts with them. Waits until no round generates.

    With `wait` the answer is the result, and the work is cancelled if the client goes away; `url` is not used.
    Without, the work is queued and its result kept for a while, and sent to `url` if there is one.
    """
    try:
        return await answer(await while_connected(request.receive, service.generate(body)))
    except ClientGone as error:
        raise refusal(HTTPStatus.REQUEST_TIMEOUT, "ClientGone", str(error)) from None


@router.get(
    "/generate/{request_id}", response_model=GeneratedResponse | ValidatedResponse | JobResponse, **_WITHOUT_NONE
)
async def generate_result(
    request_id: str, service: Service
) -> GeneratedResponse | ValidatedResponse | JobResponse | Response:
    """Tell the state or the result of queued work."""
    return await answer(service.jobs.find(request_id))


@router.get("/status")
async def status(
    service: Service,
    lists: bool = True,
    renew_lease: RoundId | None = None,
    lease_seconds: LeaseSeconds | None = None,
) -> StatusResponse:
    """Tell what runs and how far it got. Without `lists` the valid nonces are left out, for frequent polls.

    `renew_lease` is for the owner of the round that generates: its `round_id` renews the lease, for `lease_seconds` if
    that is there.
    """
    renewal = LeaseRenewal(renew_lease=renew_lease, lease_seconds=lease_seconds)
    return await service.status(lists=lists, renewal=renewal)


@router.post("/stop")
async def stop(service: Service, round_id: str | None = None, preempted_by: ShortText | None = None) -> CommandResponse:
    """Stop the round, deliver what is left, and cancel queued work; results that are there stay.

    With `round_id`: stop only if that round runs, and leave queued work alone. `preempted_by` names the round that the
    pod is stopped for, as a scheduler of rounds does; `GET status` tells it.
    """
    return await service.stop(round_id, preempted_by)


@router.get("/versions")
async def versions(service: Service) -> VersionsResponse:
    """Tell what runs here, and which schemes it computes. Validation never aborts inference."""
    return await service.versions(vllm_version())


@router.get("/gpus")
async def gpus() -> GpusResponse:
    """Tell of the GPUs that this pod sees, and what their sensors say; none on a CPU."""
    return await asyncio.to_thread(read_gpus)


def create_app(service: PocService) -> FastAPI:
    """Return the ASGI app that serves the routes for ``service``."""
    app = FastAPI(
        title="vLLM Proof-of-Compute",
        version="1",
        openapi_url=f"{API_PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        routes=router.routes,
    )
    app.state.service = service
    install_handlers(app)
    return app
