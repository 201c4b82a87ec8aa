# SPDX-License-Identifier: Apache-2.0
"""Where results may not be sent to."""

import socket

import pytest

from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.guard import AddressGuard, AddressInfo, AddressRefused
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from tests.support.builders.forwarding import Receiver, add_round, running, settings, store, until


def info(address: str) -> AddressInfo:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 80)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%lo",
        "fec0::1",
        "fd00::1",
        "ff0e::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::1",
        "64:ff9b::a9fe:a9fe",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(AddressRefused, match="is not a public address: if results may be sent there, add its range"):
        AddressGuard(Settings()).open_socket(info(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_not(address: str) -> None:
    AddressGuard(Settings()).open_socket(info(address)).close()


def test_private_ranges_may_be_permitted() -> None:
    guard = AddressGuard(settings(receiver_private="10.0.0.0/8,fd00::/8"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1"):
        guard.open_socket(info(address)).close()
    with pytest.raises(AddressRefused):
        guard.open_socket(info("127.0.0.1"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "none of http or https"),
        ("file:///etc/passwd", "none of http or https"),
        ("//host/x", "none of http or https"),
        ("http://user:password@host/", "a user or a password"),
        ("http://host\\@other/", "cannot be read"),
        ("http://host/a\r\nX: y", "spaces or characters beyond ASCII"),
        ("http://host/ü", "spaces or characters beyond ASCII"),
        ("http://host:99999/", "cannot be read"),
        ("http://a..example.org/", "cannot be read"),
        ("http://.example.org/", "cannot be read"),
        (f"http://{'a' * 64}.example.org/", "cannot be read"),
        ("http://evil.org/", "host evil.org is not allowed as a receiver"),
        ("http://example.org.evil.org/", "is not allowed"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(AddressRefused, match=message):
        AddressGuard(settings(receiver_allow="*.example.org,host")).url(url)


@pytest.mark.parametrize("url", ["http://a.example.org/x", "https://HOST:8443/a%252Fb", "http://a.example.org./"])
def test_urls_that_are_not(url: str) -> None:
    guarded = AddressGuard(settings(receiver_allow="*.example.org,Host")).url(url)
    assert guarded.raw_path == "/" + url.split("/", 3)[3]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
async def test_nothing_reaches_this_machine(database: Database, receiver: Receiver, host: str) -> None:
    round_id = await add_round(database, receiver.url.replace("127.0.0.1", host))
    await store(database, round_id, [0])
    async with running(Outbox(database, settings(receiver_private=""))) as outbox:
        await until(lambda: (forwarder := outbox.forwarder(round_id)) is not None and forwarder.error is not None)
        forwarder = outbox.forwarder(round_id)
        assert forwarder is not None
        assert "is not a public address" in str(forwarder.error)
    assert not receiver.posts


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f.0.0.1"])
async def test_other_ways_to_write_this_machine(database: Database, receiver: Receiver, host: str) -> None:
    round_id = await add_round(database, receiver.url.replace("127.0.0.1", host))
    await store(database, round_id, [0])
    async with running(Outbox(database, settings(receiver_private=""))) as outbox:
        await until(lambda: (forwarder := outbox.forwarder(round_id)) is not None and forwarder.error is not None)
    assert not receiver.posts
