# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between the operator and pods, the gateway, and the API server.

::

    PodError
     ├── PodUnreachable   no connection: the outcome of a request may be unknown
     ├── PodTimeout       connected, but no answer in time: the outcome is unknown
     ├── PodRefused       the pod understood and declined, with a reason
     │    └── PodBusy     it computes another round
     └── NotAPodOfOurs    something answered that does not speak the PoC protocol
    GatewayError          whatever went wrong, the gateway is asked again later
    StoreError
     ├── StaleObject       somebody changed the object meanwhile: read it anew and plan again
     ├── ObjectGone        the object does not exist any more
     ├── ObjectInvalid     the API server refused the object's content, and says why
     └── StoreUnavailable the API server did not answer, or not as expected: try again later
          ├── StoreForbidden  it refused, since the operator lacks the right
          └── EvictionRefused it refused for now, as when a PodDisruptionBudget protects the pod
    UnreadableObject       no failed request: the object is not what the CRD allows, and stays so
"""

from collections.abc import Mapping, Sequence
from typing import Any


class PodError(Exception):
    """A request to a pod failed; the text says why."""


class PodUnreachable(PodError):  # noqa: N818 - reads as a state, like the HTTP client's own errors
    """No connection to the pod."""


class PodTimeout(PodError):  # noqa: N818
    """The pod did not answer in time."""


class PodRefused(PodError):  # noqa: N818
    """The pod declined the request; ``reason`` is a CamelCase word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PodBusy(PodRefused):
    """The pod computes another round."""


class NotAPodOfOurs(PodError):  # noqa: N818
    """The answer is not one of the PoC protocol."""


class GatewayError(Exception):
    """A question to the gateway was not answered; the text says why."""


class StoreError(Exception):
    """A request to the API server failed."""


class StaleObject(StoreError):  # noqa: N818 - reads as a state
    """The object changed since it was read."""


class ObjectGone(StoreError):  # noqa: N818
    """The object does not exist any more, so that nothing can be recorded in it."""


class ObjectInvalid(StoreError):  # noqa: N818
    """The object's spec breaks a rule of the CRD; the text is the API server's.

    ``fields`` are the paths that it names with what is wrong with each, as ``("spec.publicKey", "must be ...")``.
    """

    def __init__(self, message: str, fields: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


class StoreUnavailable(StoreError):  # noqa: N818
    """The API server cannot be used at the moment."""


class StoreForbidden(StoreUnavailable):
    """The operator lacks the right to do this."""


class EvictionRefused(StoreUnavailable):
    """A pod cannot be evicted for now."""


class UnreadableObject(Exception):  # noqa: N818
    """A stored object that the models refuse, as one that an older CRD accepted; the text names the field.

    ``body`` is the object as the API server has it.
    """

    def __init__(self, message: str, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.body = body
        metadata = body["metadata"]
        self.namespace, self.name = str(metadata["namespace"]), str(metadata["name"])
        self.generation = int(metadata["generation"])
