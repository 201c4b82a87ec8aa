# SPDX-License-Identifier: Apache-2.0
"""``python -m poc_operator.controller.uninstall``: what `helm uninstall` runs before the operator goes.

Everything that is not finished is suspended. The operator, which still runs, stops the pods and takes off its
finalizer. What is not suspended when the time is up loses the finalizer here: without an operator it could never be
deleted. The objects stay, and go on where they were once an operator is installed again and ``spec.suspend`` is false.

Nothing is touched while an operator of another installation holds the Lease: the work is that one's, and goes on.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

from poc_operator.apis.v1alpha1.meta import COMPONENT, FINALIZER, LabelSelector, Resource
from poc_operator.apis.v1alpha1.status import is_finished, is_over
from poc_operator.clients.errors import StoreError
from poc_operator.clients.kube.connection import connect
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.kinds import PLANNERS
from poc_operator.controller.leader_election import LeaseReader

log = logging.getLogger(__name__)

#: Seconds between two looks.
LOOK_SECONDS = 1.0

_Found = list[tuple[type[Resource], Mapping[str, Any]]]


#: Returns who holds the Lease and acts, if that is no operator of this installation; None if there is nobody else.
OtherHolder = Callable[[], Awaitable[str | None]]


async def suspend_all(
    store: ObjectStore, namespaces: Collection[str], seconds: float, *, other_holder: OtherHolder
) -> None:
    """Suspend what is not finished and wait until it is, or time is up. Without namespaces: in all of them.

    It ends at once while an operator of another installation acts.
    """
    end = time.monotonic() + seconds
    told = set[str]()
    while True:
        try:
            other = await other_holder()
            if other is not None:
                log.info(
                    "nothing is suspended: %s, of another installation, holds the Lease. All work is left to it"
                    if not told
                    else "the rest is left alone: %s, of another installation, holds the Lease by now",
                    other,
                )
                return
            left = await _left(store, namespaces)
            await _suspend(store, left, told)
            if not left:
                return
            if time.monotonic() >= end:
                await _release(store, await _left(store, namespaces))  # as they are by now
                return
        except StoreError as error:
            log.warning("API server: %s; trying again", error)
            if time.monotonic() >= end:
                raise
        await asyncio.sleep(LOOK_SECONDS)


async def _left(store: ObjectStore, namespaces: Collection[str]) -> _Found:
    """Return the objects for which pods may work, or which the operator's finalizer holds."""
    found: _Found = []
    for kind in PLANNERS:
        found += [(kind.resource, body) for body in await store.list_bodies(kind.resource, namespaces)]
    return [(resource, body) for resource, body in found if not _is_over(body)]


def _is_over(body: Mapping[str, Any]) -> bool:
    return is_over(body.get("status") or {}) and FINALIZER not in (body["metadata"].get("finalizers") or [])


async def _suspend(store: ObjectStore, found: _Found, told: set[str]) -> None:
    for resource, body in found:
        uid = body["metadata"]["uid"]
        if uid in told or is_finished(body.get("status") or {}):
            continue
        if not (body.get("spec") or {}).get("suspend"):
            log.info("suspending %s", _name(resource, body))
            if not await _patch(store, resource, body, {"spec": {"suspend": True}}):
                continue
        told.add(uid)


async def _release(store: ObjectStore, found: _Found) -> None:
    for resource, body in found:
        log.warning(
            "%s is not suspended: the operator does not run, or pods do not answer. They stop when their lease of work "
            "runs out, or when they are restarted",
            _name(resource, body),
        )
        finalizers = body["metadata"].get("finalizers") or []
        if FINALIZER in finalizers:
            others = [finalizer for finalizer in finalizers if finalizer != FINALIZER]
            await _patch(store, resource, body, {"metadata": {"finalizers": others}})


async def _patch(
    store: ObjectStore, resource: type[Resource], body: Mapping[str, Any], changes: Mapping[str, Any]
) -> bool:
    """Change an object; one that cannot be changed does not keep the others from it."""
    try:
        await store.patch(resource, body, changes)
    except StoreError as error:
        log.warning("%s: %s", _name(resource, body), error)
        return False
    return True


def _name(resource: type[Resource], body: Mapping[str, Any]) -> str:
    return f"{resource.KIND.kind} {body['metadata']['namespace']}/{body['metadata']['name']}"


async def holder_of_another(
    lease: LeaseReader, store: ObjectStore, namespace: str, *, release: str, identity: str | None = None
) -> str | None:
    """Return who holds the Lease, if it is alive and none of the operator's pods of this release; else None.

    Operators take the names of their pods; one that does not has this ``identity``. StoreError if the Lease or the pods
    cannot be read.
    """

    async def is_ours(holder: str) -> bool:
        labels = {"app.kubernetes.io/name": COMPONENT, "app.kubernetes.io/instance": release}
        pods = await store.list_pods(namespace, LabelSelector(match_labels=labels))
        return holder in {identity, *(pod.name for pod in pods)}

    return await lease.living_holder(but=is_ours)


async def _main(options: argparse.Namespace) -> None:
    api, namespace = await connect()
    store = ObjectStore(api)
    lease = LeaseReader(api, options.lease_namespace or namespace, time.monotonic)
    mine = {"release": options.release, "identity": options.identity}
    other = partial(holder_of_another, lease, store, namespace, **mine)
    try:
        await suspend_all(store, options.namespace, options.wait_seconds, other_holder=other)
    finally:
        await store.close()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="poc_operator.controller.uninstall", description="Suspends all work.")
    parser.add_argument("--namespace", action="append", default=[], help="only here; may be repeated (default: all)")
    parser.add_argument("--wait-seconds", type=float, default=120.0, help="how long to wait (default: 120)")
    parser.add_argument("--lease-namespace", help="where the Lease is (default: the namespace of this process)")
    parser.add_argument("--release", default=COMPONENT, help=f"name of the Helm release (default: {COMPONENT})")
    parser.add_argument("--identity", help="name of its operator in the Lease, if that is not its pod's")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    asyncio.run(_main(options))


if __name__ == "__main__":
    main()
