# SPDX-License-Identifier: Apache-2.0
"""The REST routes under ``/api/v1/pow``."""

from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request

from vllm_poc.server.errors import install_handlers
from vllm_poc.server.service import PocService
from vllm_poc.wire.base import API_PREFIX
from vllm_poc.wire.requests import GenerateRequest, InitGenerateRequest
from vllm_poc.wire.responses import CommandResponse, GeneratedResponse, StatusResponse

router = APIRouter(prefix=API_PREFIX)


def _service(request: Request) -> PocService:
    service: PocService = request.app.state.service
    return service


Service = Annotated[PocService, Depends(_service)]


@router.post("/init/generate")
async def init_generate(request: InitGenerateRequest, service: Service) -> CommandResponse:
    """Start to compute the nonces of one slot."""
    return await service.start(request)


@router.post("/generate", response_model_exclude_none=True)
async def generate(request: GenerateRequest, service: Service) -> GeneratedResponse:
    """Compute the named nonces and answer with their results."""
    return await service.generate(request)


@router.get("/status")
async def status(service: Service, lists: bool = True) -> StatusResponse:
    """Tell what runs and how far it got. Without ``lists`` the valid nonces are left out, for frequent polls."""
    return await service.status(lists=lists)


@router.post("/stop")
async def stop(service: Service, round_id: str | None = None) -> CommandResponse:
    """Stop the round and deliver what is left. With ``round_id``: only if that round runs."""
    return await service.stop(round_id)


def create_app(service: PocService) -> FastAPI:
    """Return the ASGI app that serves the routes for ``service``."""
    app = FastAPI(title="vLLM Proof-of-Compute", openapi_url=None)
    app.state.service = service
    app.include_router(router)
    install_handlers(app)
    return app
