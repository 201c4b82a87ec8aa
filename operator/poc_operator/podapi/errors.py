# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between operator and pod, and between operator and gateway.

PodError
 ├── PodUnreachable   no connection: the outcome of a request may be unknown
 ├── PodTimeout       connected, but no answer in time: the outcome is unknown
 ├── PodRefused       the pod understood and declined, with a reason
 │    └── PodBusy     it computes another round
 └── NotAPodOfOurs    something answered that does not speak the PoC protocol

GatewayError stands for itself: whatever went wrong, the gateway is asked again later.
"""


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
