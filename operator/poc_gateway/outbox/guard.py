# SPDX-License-Identifier: Apache-2.0
"""Which addresses the gateway posts to: what a PoCRound names is not to be trusted.

A name is checked against the settings before the call. Its addresses are checked where a socket is opened for one of
them: no other answer of the DNS can slip in between, and an address that is written out is no exception.
"""

import re
import socket
from collections.abc import Iterator
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

from yarl import URL

from poc_gateway.settings import Settings

#: Visible ASCII: anything else would have to be quoted first, and a line break would end the request's first line.
_WRITTEN = re.compile(r"[!-~]+")
_NAT64 = IPv6Network("64:ff9b::/96")
#: What the setting is called for people: in the environment, and in the values of the chart.
RECEIVER_ALLOW = "POC_GATEWAY_RECEIVER_ALLOW (in the chart gateway.receivers.allow)"

#: Family, type, protocol, canonical name and socket address, as getaddrinfo returns them.
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


class AddressRefused(OSError):  # noqa: N818 - reads as a state
    """The settings forbid to post there. An OSError, so that the HTTP client takes it for one of the connection."""


class AddressGuard:
    """Checks addresses against ``receiver_allow`` and ``receiver_private``."""

    def __init__(self, settings: Settings) -> None:
        self._allow = [pattern.lower() for pattern in settings.receiver_allow]
        self._private = settings.receiver_private

    def url(self, text: str) -> URL:
        """Return the URL exactly as it is written; AddressRefused if nothing may be posted there."""
        if not _WRITTEN.fullmatch(text):
            raise AddressRefused(
                "the receiver's URL holds spaces or characters beyond ASCII: write them percent-encoded"
            )
        try:
            url = URL(text, encoded=True)
            host, _ = url.raw_host, url.port
            # As the resolver will: a label that is empty or too long fails there with what is no error of a connection.
            (host or "").encode("idna")
        except ValueError as error:
            raise AddressRefused(f"the receiver's URL cannot be read ({error}): correct the address") from None
        if url.scheme not in {"http", "https"} or not host:
            raise AddressRefused("the receiver's URL is none of http or https: use http://HOST or https://HOST")
        if url.raw_user is not None or url.raw_password is not None:
            raise AddressRefused("the receiver's URL holds a user or a password: take them out")
        if not any(fnmatchcase(host.lower().rstrip("."), pattern) for pattern in self._allow):
            raise AddressRefused(f"host {host} is not allowed as a receiver: add it to {RECEIVER_ALLOW}")
        return url

    def open_socket(self, info: AddressInfo) -> socket.socket:
        """Return a socket to connect to the address with; AddressRefused if it is neither public nor permitted."""
        family, kind, protocol, _, (host, *_) = info
        address = ip_address(host)
        for meant in _meant(address):
            if not (_is_public(meant) or any(meant in network for network in self._private)):
                raise AddressRefused(
                    f"{address} is not a public address: if results may be sent there, "
                    "add its range to POC_GATEWAY_RECEIVER_PRIVATE (in the chart gateway.receivers.private)"
                )
        return socket.socket(family, kind, protocol)


def _meant(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address | IPv6Address]:
    """Return the addresses that packets to this one may end at: translators find an IPv4 address in some of IPv6."""
    if isinstance(address, IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFF_FFFF)
    else:
        yield address
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    special = (
        address.is_multicast or address.is_reserved or (isinstance(address, IPv6Address) and address.is_site_local)
    )
    return address.is_global and not special
