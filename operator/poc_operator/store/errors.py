# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between operator and API server.

StoreError
 ├── StaleRound       somebody changed the object meanwhile: read it anew and plan again
 ├── RoundInvalid     the API server refused the object's content, and says why
 └── StoreUnavailable the API server did not answer, or not as expected: try again later
      └── StoreForbidden  it refused, since the operator lacks the right

UnreadableRound is no failed request: the object is not what the CRD allows, and stays so.
"""


class StoreError(Exception):
    """A request to the API server failed."""


class StaleRound(StoreError):  # noqa: N818 - reads as a state
    """The round, or another object, changed since it was read."""


class RoundInvalid(StoreError):  # noqa: N818
    """The round's spec breaks a rule of the CRD; the text is the API server's."""


class StoreUnavailable(StoreError):  # noqa: N818
    """The API server cannot be used at the moment."""


class StoreForbidden(StoreUnavailable):
    """The operator lacks the right to do this."""


class UnreadableRound(Exception):  # noqa: N818
    """A stored round that the models refuse, as one that an older CRD accepted; the text names the field."""

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message)
        self.generation = generation
