# SPDX-License-Identifier: Apache-2.0
"""Callback credentials: what a pod proves to the gateway with each delivery, and what it may deliver.

The operator signs a `Grant` for each start and puts it into the callback address as its password. The gateway checks it
without asking anybody. A credential is ``PAYLOAD.SIGNATURE``, both base64url without padding: a JSON list of a version,
the grant's fields and the end of its validity, and its HMAC-SHA256.

Secrets are settings of one or several values, separated by commas: the first is used, all are accepted.
"""

import hashlib
import hmac
import json
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

#: Header with the token of people, for those who come through the API server's proxy, which takes Authorization away.
GATEWAY_TOKEN_HEADER = "X-PoC-Gateway-Token"  # noqa: S105 - a name
#: Seconds for which a credential is good. One of our pods gets another when the gateway refuses it.
VALID_SECONDS = 7 * 86_400
#: Nonces per second that no pod exceeds, unless told otherwise: more than five times the fastest that was measured.
RATE_LIMIT = 50_000
#: Seconds by which the clocks of operator and gateway may differ.
MARGIN_SECONDS = 60

#: Credentials that are known again; the one that was seen first is forgotten first.
MOST_KNOWN = 20_000

_VERSION = 1
_DOMAIN = b"poc-callback-credential."


class CredentialError(Exception):
    """A credential that is not accepted; the text says why and has nothing of it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a pod may deliver: results of one slot of a round, as far as it can have come.

    ``round`` is the round's uid and ``slot`` the slot's first nonce. The pod began at index ``start`` at the moment
    ``since``, in seconds since 1970, and computes at most ``rate`` nonces per second.
    """

    round: str
    slot: int
    pod: str
    pod_uid: str
    start: int
    since: int
    rate: int

    def reach(self, now: float) -> int:
        """Return the first index that the pod cannot have computed at ``now``, in seconds since 1970."""
        return self.start + plausible_nonces(self.rate, now - self.since)


def plausible_nonces(rate: int, seconds: float) -> int:
    """Return how many nonces one pod after the other can have computed within so many seconds of another clock."""
    return math.ceil(rate * (max(0.0, seconds) + MARGIN_SECONDS))


def sign(key: str, grant: Grant, expires: int) -> str:
    """Return the credential of a grant, good until ``expires`` in seconds since 1970."""
    payload = _encoded(json.dumps([_VERSION, *astuple(grant), expires], separators=(",", ":")).encode())
    return f"{payload}.{_signature(key, payload)}"


class Verifier:
    """Checks credentials against some keys. Those that it has seen it knows again: a pod sends the same for days."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._known = OrderedDict[str, tuple[Grant, int]]()

    def verify(self, credential: str, now: float) -> Grant:
        """Return the grant of a credential that is signed by one of the keys; CredentialError for any other.

        ``now`` is in seconds since 1970.
        """
        found = self._known.get(credential) or self._read(credential)
        self._known[credential] = found
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        grant, expires = found
        if now >= expires:
            raise CredentialError("it has expired")
        return grant

    def _read(self, credential: str) -> tuple[Grant, int]:
        payload, _, signature = credential.partition(".")
        sent = signature.encode()
        if not any(hmac.compare_digest(_signature(key, payload).encode(), sent) for key in self._keys):
            raise CredentialError("it is not signed with a key of this gateway")
        version, *fields = json.loads(_decoded(payload))
        if version != _VERSION:
            raise CredentialError(f"it is of version {version}, and this gateway knows {_VERSION}: upgrade the gateway")
        *granted, expires = fields
        return Grant(*granted), expires


def secrets_of(text: str | None) -> tuple[str, ...]:
    """Return the values of a setting; none if it is not set. ValueError if it is set and has none."""
    if text is None:
        return ()
    values = tuple(part.strip() for part in text.split(",") if part.strip())
    if not values:
        raise ValueError("is empty: set one secret, or several separated by commas, or leave it out")
    return values


def _signature(key: str, payload: str) -> str:
    return _encoded(hmac.new(key.encode(), _DOMAIN + payload.encode(), hashlib.sha256).digest())


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (Base64Error, ValueError) as error:
        raise CredentialError("it cannot be read") from error
