# SPDX-License-Identifier: Apache-2.0
"""Start, settings, health and end of the operator's process."""

import os

import kopf

from poc_operator.model import names
from poc_operator.runtime.operator import Operator


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: object) -> None:
    """Set kopf up and connect."""
    settings.peering.standalone = True
    # Namespaces and CRDs are known at the start: no right to watch them is asked for.
    settings.scanning.disabled = True
    settings.persistence.finalizer = names.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.GROUP)
    settings.posting.reporting_component = names.COMPONENT
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = (0.5, 1, 2, 3)
    settings.watching.chunk_size = 500
    settings.execution.default_backoff = 2
    memo.operator = await Operator.create(os.environ.get("POC_POD_TOKEN") or None)


@kopf.on.cleanup()
async def end(memo: kopf.Memo, **_: object) -> None:
    """Close connections. The pods go on computing; the next process adopts them."""
    operator: Operator = memo.operator
    await operator.close()


@kopf.on.probe(id="rounds")
async def rounds_are_driven(memo: kopf.Memo, **_: object) -> str:
    """Liveness: fails when a round's loop hangs, so that Kubernetes restarts the process."""
    operator: Operator = memo.operator
    hung = operator.hung_rounds()
    if hung:
        raise kopf.PermanentError(f"rounds not driven: {', '.join(hung)}")
    return "ok"
