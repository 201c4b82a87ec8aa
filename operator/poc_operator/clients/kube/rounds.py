# SPDX-License-Identifier: Apache-2.0
"""Reading rounds, writing their status, deleting them; and deleting pods that cannot be helped otherwise.

The status is written against the resource version that was read. A plan made from an outdated
round, as by an operator that has been replaced, is thus refused instead of overwriting a newer one.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kubernetes.aio import client
from pydantic import ValidationError

from poc_operator.clients.errors import StoreForbidden, UnreadableRound
from poc_operator.clients.kube.connection import REQUEST_SECONDS, api_errors
from poc_operator.model import names
from poc_operator.model.checks import Proof, parse_proofs
from poc_operator.model.conditions import Condition, merge_conditions
from poc_operator.model.round import Round
from poc_operator.model.status import RoundStatus
from poc_operator.observed.pods import PodView

log = logging.getLogger(__name__)

_KIND: dict[str, Any] = {
    "group": names.GROUP,
    "version": names.VERSION,
    "plural": names.PLURAL,
    "_request_timeout": REQUEST_SECONDS,
}


class RoundStore:
    """The PoCRounds of the cluster."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, namespace: str, name: str) -> Round | None:
        """Return the round as it is now; None if it does not exist; UnreadableRound if it cannot be understood."""
        async with api_errors():
            body: Any = await self._objects.get_namespaced_custom_object(**self._key(namespace, name))
            return _parse(body)
        return None

    async def list_rounds(self, namespaces: Collection[str]) -> list[Round]:
        """Return the rounds of these namespaces; without any, of all. What cannot be understood is left out."""
        async with api_errors():
            if not namespaces:
                found: Any = await self._objects.list_cluster_custom_object(**_KIND)
                return list(readable(found["items"]))
            lists: list[Any] = [
                await self._objects.list_namespaced_custom_object(namespace=namespace, **_KIND)
                for namespace in namespaces
            ]
            return list(readable(body for found in lists for body in found["items"]))
        return []

    async def list_pods(self, round_: Round) -> list[PodView]:
        """Return the pods that match the round's selector."""
        labels = round_.spec.selector.query
        if labels is None:
            return []
        async with api_errors():
            pods: Any = await self._core.list_namespaced_pod(
                round_.metadata.namespace, label_selector=labels, _request_timeout=REQUEST_SECONDS
            )
            return [PodView.parse(body) for body in self._api.sanitize_for_serialization(pods.items)]  # type: ignore[no-untyped-call]
        return []

    async def write_status(self, round_: Round, status: RoundStatus) -> None:
        """Replace the round's status; StaleRound if the round changed since it was read."""
        patch = {
            "metadata": {"resourceVersion": round_.metadata.resource_version},
            "status": _merge_patch(status),
        }
        async with api_errors():
            await self._objects.patch_namespaced_custom_object_status(
                **self._key(round_.metadata.namespace, round_.metadata.name),
                body=patch,
                _content_type="application/merge-patch+json",
            )

    async def write_conditions(self, namespace: str, name: str, conditions: Sequence[Condition], message: str) -> None:
        """Change these conditions and the message of a round, whatever else stands in it.

        Nothing happens if it is gone. StaleRound if somebody changed it meanwhile.
        """
        async with api_errors():
            body: Any = await self._objects.get_namespaced_custom_object(**self._key(namespace, name))
            known = [Condition.model_validate(found) for found in (body.get("status") or {}).get("conditions") or []]
            merged = merge_conditions(known, conditions)
            await self._objects.patch_namespaced_custom_object_status(
                **self._key(namespace, name),
                body={
                    "metadata": {"resourceVersion": body["metadata"]["resourceVersion"]},
                    "status": {
                        "conditions": [found.model_dump(mode="json", by_alias=True) for found in merged],
                        "message": message,
                    },
                },
                _content_type="application/merge-patch+json",
            )

    async def proofs(self, round_: Round) -> Sequence[Proof] | str:
        """Return the proofs that the round checks, or why they cannot be had; none if it checks none."""
        proofs = round_.spec.proofs
        if proofs is None or proofs.config_map is None:
            return (proofs.inline if proofs else None) or ()
        name, key = proofs.config_map.name, proofs.config_map.key
        try:
            async with api_errors():
                found = await self._core.read_namespaced_config_map(
                    name, round_.metadata.namespace, _request_timeout=REQUEST_SECONDS
                )
                where = f'key "{key}" of ConfigMap "{name}"'
                return parse_proofs(where, (found.data or {}).get(key), round_.spec.protocol)
        except StoreForbidden as error:
            return f'ConfigMap "{name}" cannot be read ({error}): install the chart with rbac.readConfigMaps=true'
        return f'there is no ConfigMap "{name}" in namespace "{round_.metadata.namespace}": create it'

    async def delete(self, round_: Round) -> None:
        """Delete the round; nothing happens if it is gone or was replaced by another of its name."""
        async with api_errors():
            await self._objects.delete_namespaced_custom_object(
                **self._key(round_.metadata.namespace, round_.metadata.name),
                body=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=round_.metadata.uid)),
            )

    async def delete_pod(self, pod: PodView) -> None:
        """Delete the pod; nothing happens if it is gone or was replaced by another of its name."""
        async with api_errors():
            await self._core.delete_namespaced_pod(
                pod.name,
                pod.namespace,
                body=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid)),
                _request_timeout=REQUEST_SECONDS,
            )

    def _key(self, namespace: str, name: str) -> dict[str, Any]:
        return {**_KIND, "namespace": namespace, "name": name}


def _parse(body: Mapping[str, Any]) -> Round:
    try:
        return Round.parse(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UnreadableRound(f"{field}: {first['msg']}", body["metadata"]["generation"]) from error


def readable(bodies: Iterable[Mapping[str, Any]]) -> Iterator[Round]:
    """Yield the rounds that can be understood; the others are logged."""
    for body in bodies:
        try:
            yield _parse(body)
        except UnreadableRound as error:
            log.warning("round %s/%s: %s", body["metadata"]["namespace"], body["metadata"]["name"], error)


def _merge_patch(status: RoundStatus) -> dict[str, Any]:
    """Return the status as a JSON merge patch: a field that is unset now becomes null, which deletes it."""
    patch = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    # A thousand slots must fit; what has its default value is left out.
    for name, shares in (("assignments", status.assignments), ("samples", status.samples)):
        patch[name] = [share.model_dump(mode="json", by_alias=True, exclude_defaults=True) for share in shares]
    aliases = (str(field.alias) for field in RoundStatus.model_fields.values())
    return dict.fromkeys(aliases) | patch
