# SPDX-License-Identifier: Apache-2.0
"""Start, settings, health and end of the operator's process."""

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import kopf
from yarl import URL

from poc_operator.apis.v1alpha1.meta import COMPONENT, FINALIZER, GROUP
from poc_operator.clients.gateway import GatewayClient
from poc_operator.controller.event_loop import collect_garbage
from poc_operator.controller.fleet_surroundings import FleetOptions
from poc_operator.controller.health import serve_health, supervised
from poc_operator.controller.leader_election import LeaderElection
from poc_operator.controller.manager import Manager
from poc_operator.controller.metrics import serve_metrics
from poc_operator.credentials import secrets_of

log = logging.getLogger(__name__)


class Backoffs:
    """Seconds between tries of kopf's requests, without an end.

    When they end, kopf's watch of one namespace ends the process, and with it the work on all others: as when a
    namespace is deleted, and with it the rights in it.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 3), itertools.repeat(10))


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: object) -> None:
    """Set kopf up and connect."""
    settings.peering.standalone = True
    # Namespaces and CRDs are known at the start: no right to watch them is asked for.
    settings.scanning.disabled = True
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.posting.reporting_component = COMPONENT
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = Backoffs()
    settings.watching.chunk_size = 500
    settings.execution.default_backoff = 2
    memo.until_end = stack = AsyncExitStack()
    memo.manager = manager = await Manager.create(
        _gateway(memo.options.gateway_url),
        memo.options.lease_namespace,
        memo.options.identity,
        token_secret=memo.options.pod_token_secret,
        rate_limit=memo.options.max_nonces_per_second,
        # With the rights of Roles alone a finalizer may outlive them: whoever deletes the namespace deletes both.
        holds_deleted=not memo.options.namespace,
        lease_seconds=memo.options.pod_lease_seconds,
        fleet_options=FleetOptions(
            namespaces=memo.options.namespace,
            image=memo.options.worker_image,
            token_secret=memo.options.pod_token_secret,
            gateway_host=URL(url).host if (url := memo.options.gateway_url) is not None else None,
        ),
    )
    stack.push_async_callback(manager.close)
    await _serve(stack, "--health-port", serve_health(manager.health_findings, memo.options.health_port))
    await _serve(stack, "--metrics-port", serve_metrics(manager.metrics, memo.options.metrics_port))
    await manager.lease.acquire()
    stack.push_async_callback(manager.lease.release)
    stack.callback(supervised("leader election", _end_without(manager.lease)).cancel)
    await manager.identify()
    await manager.wait_for_kinds()
    stack.push_async_callback(manager.stop)
    tasks = {
        "reaper": manager.reaper.run(),
        "watch check": manager.check_watches(memo.options.namespace),
        "lag of the event loop": manager.measure_lag(),
        "search for garbage": collect_garbage(),
    }
    if manager.fleets is not None:
        tasks["fleets"] = manager.fleets.run()
    for name, task in tasks.items():
        stack.callback(supervised(name, task).cancel)


async def _serve(stack: AsyncExitStack, option: str, served: AbstractAsyncContextManager[None]) -> None:
    try:
        await stack.enter_async_context(served)
    except OSError as error:
        raise kopf.PermanentError(f"{option}: {error}") from error


def _gateway(url: str | None) -> GatewayClient | None:
    if url is None:
        return None
    return GatewayClient(url, _secret("POC_GATEWAY_OPERATOR_TOKEN"), _secret("POC_GATEWAY_CALLBACK_KEY"))


def _secret(name: str) -> str | None:
    """Return the first secret of an environment variable; the others are for who checks them."""
    try:
        return next(iter(secrets_of(os.environ.get(name))), None)
    except ValueError as error:
        raise kopf.PermanentError(f"{name} {error}") from error


async def _end_without(lease: LeaderElection) -> None:
    """End the process at once when the lease is lost. The pods go on; whoever has the lease adopts them."""
    try:
        await lease.keep()
    except Exception:
        log.exception("the lease cannot be kept")
    why = f"held by {lease.holder}" if lease.taken else "not renewed in time"
    log.critical("the lease is %s: ending at once, so that no two operators act", why)
    logging.shutdown()
    os._exit(1)


@kopf.on.cleanup()
async def end(memo: kopf.Memo, **_: object) -> None:
    """Close connections. The pods go on computing; the next process adopts them."""
    stack: AsyncExitStack = memo.until_end
    await stack.aclose()
