# SPDX-License-Identifier: Apache-2.0
"""Rounds of a simulation, handled through the API server."""

import asyncio
import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from poc_operator.apis.v1alpha1 import meta
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.simulation.manifests import Manifest

REQUEST_SECONDS = 5.0
#: For requests about all rounds, of which there may be a thousand.
ALL_SECONDS = 60.0
TROUBLE = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


class Rounds:
    """The rounds of one namespace."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._all: dict[str, Any] = {
            "group": meta.GROUP,
            "version": meta.VERSION,
            "plural": PoCRound.KIND.plural,
            "namespace": namespace,
            "_request_timeout": REQUEST_SECONDS,
        }
        self._of_all = self._all | {"_request_timeout": ALL_SECONDS}

    async def create(self, manifest: Manifest) -> None:
        """Create a round."""
        await self._objects.create_namespaced_custom_object(body=manifest, **self._all)

    async def body(self, name: str) -> dict[str, Any]:
        """Return the round as the API server has it."""
        body: Any = await self._objects.get_namespaced_custom_object(name=name, **self._all)
        return dict(body)

    async def get(self, name: str) -> PoCRound:
        """Return the round."""
        return PoCRound.parse(await self.body(name))

    async def bodies(self) -> list[dict[str, Any]]:
        """Return all rounds as the API server has them."""
        found: Any = await self._objects.list_namespaced_custom_object(**self._of_all)
        return list(found["items"])

    async def suspend(self, name: str, suspend: bool) -> None:
        """Set ``spec.suspend``; tried until the API server has done it."""
        while True:
            with contextlib.suppress(*TROUBLE):
                await self._patch(name, {"spec": {"suspend": suspend}})
                return
            await asyncio.sleep(0.5)

    async def write_status(self, name: str, status: Manifest) -> None:
        """Change the stored status, whatever the operator thinks of it."""
        await self._objects.patch_namespaced_custom_object_status(
            name=name, body={"status": status}, _content_type="application/merge-patch+json", **self._all
        )

    async def delete(self, name: str) -> None:
        """Delete a round; the operator lets it go."""
        await self._objects.delete_namespaced_custom_object(name=name, **self._all)

    async def wait_until(self, name: str, reached: Callable[[PoCRound], bool], seconds: float) -> PoCRound:
        """Wait until the round is as wanted; fails after ``seconds``."""
        deadline, last = monotonic() + seconds, None
        while monotonic() < deadline:
            with contextlib.suppress(*TROUBLE):
                last = await self.get(name)
                if reached(last):
                    return last
            await asyncio.sleep(0.1)
        raise AssertionError(f"not seen within {seconds:.0f} s; last: {last}")

    async def delete_all(self) -> None:
        """Delete all rounds, whether an operator lives or not."""
        for body in await self.bodies():
            await self._patch(body["metadata"]["name"], {"metadata": {"finalizers": None}})
        await self._objects.delete_collection_namespaced_custom_object(**self._of_all)

    async def _patch(self, name: str, patch: Manifest) -> None:
        await self._objects.patch_namespaced_custom_object(
            name=name, body=patch, _content_type="application/merge-patch+json", **self._all
        )
