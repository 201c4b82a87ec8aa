# SPDX-License-Identifier: Apache-2.0
"""Rounds that a program creates on request and finds again by a label, and the pods that will work on them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from poc_operator.apis.v1alpha1.meta import API_VERSION, GROUP, VERSION, LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import is_finished
from poc_operator.clients.errors import ObjectInvalid, StoreUnavailable
from poc_operator.clients.kube.connection import REQUEST_SECONDS, api_errors, told_by
from poc_operator.clients.kube.objects import parse_object, readable
from poc_operator.observed import PodView

_INVALID = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
#: What the API server calls the field of a cause that has none.
_NO_FIELD = "<nil>"


class LabelledRounds:
    """The PoCRounds of one namespace that carry ``labels``. Errors are of ``clients.errors``."""

    def __init__(self, api: client.ApiClient, namespace: str, labels: Mapping[str, str]) -> None:
        self._api = api
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._labels = dict(labels)
        self._kind: dict[str, Any] = {
            "group": GROUP,
            "version": VERSION,
            "plural": PoCRound.KIND.plural,
            "namespace": namespace,
            "_request_timeout": REQUEST_SECONDS,
        }

    async def list_rounds(self) -> list[PoCRound]:
        """Return the rounds as they are now, without finished ones that cannot be understood.

        UnreadableObject if one that is not over cannot be understood: pods may compute for it.
        """
        async with api_errors():
            found: Any = await self._objects.list_namespaced_custom_object(
                label_selector=_selector(self._labels), **self._kind
            )
            over = [body for body in found["items"] if is_finished(body.get("status") or {})]
            others = [body for body in found["items"] if not is_finished(body.get("status") or {})]
            return [*(parse_object(PoCRound, body) for body in others), *readable(PoCRound, over)]
        raise self._missing()

    async def create(self, name: str, spec: Mapping[str, Any]) -> PoCRound:
        """Create a round; StaleObject if there is one of this name, ObjectInvalid if its spec is refused.

        UnreadableObject if the API server made a round of it that cannot be understood.
        """
        body = {
            "apiVersion": API_VERSION,
            "kind": PoCRound.KIND.kind,
            "metadata": {"name": name, "labels": self._labels},
            "spec": dict(spec),
        }
        async with api_errors():
            try:
                made: Any = await self._objects.create_namespaced_custom_object(body=body, **self._kind)
            except ApiException as error:
                if error.status in _INVALID:
                    raise _invalid(error) from error
                raise
            return parse_object(PoCRound, made)
        raise self._missing()

    async def finish(self, name: str) -> None:
        """Let a round end now, as if its stop was reached; nothing happens if it is gone."""
        async with api_errors():
            await self._objects.patch_namespaced_custom_object(
                name=name, body={"spec": {"finish": True}}, _content_type="application/merge-patch+json", **self._kind
            )

    async def list_pods(self, selector: LabelSelector) -> list[PodView]:
        """Return the namespace's pods that are selected."""
        async with api_errors():
            pods: Any = await self._core.list_namespaced_pod(
                self._namespace, label_selector=str(selector), _request_timeout=REQUEST_SECONDS
            )
            return [PodView.parse(body) for body in self._api.sanitize_for_serialization(pods.items)]  # type: ignore[no-untyped-call]
        raise self._missing()

    def _missing(self) -> StoreUnavailable:
        return StoreUnavailable(
            f'the API server knows no namespace "{self._namespace}", or no {PoCRound.KIND.kind}: '
            "create it, or install the CRD"
        )


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _invalid(error: ApiException) -> ObjectInvalid:
    status = told_by(error.body)
    message = str(status.get("message", f"HTTP {error.status}: {error.reason}"))
    details = status.get("details")
    causes = (details.get("causes") if isinstance(details, dict) else None) or []
    return ObjectInvalid(message, [(one["field"], str(one.get("message"))) for one in causes if _names_field(one)])


def _names_field(cause: Mapping[str, Any]) -> bool:
    """Whether it names one. Policies do not, nor does the remark that other rules were not checked."""
    return cause.get("field") not in (None, "", _NO_FIELD)
