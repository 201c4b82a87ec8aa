# SPDX-License-Identifier: Apache-2.0
"""Callback credentials: signed by one who knows a key, good for a time, and for what they say alone."""

import base64
import dataclasses
import hashlib
import hmac
import json

import pytest

from poc_operator import credentials
from poc_operator.credentials import (
    MARGIN_SECONDS,
    CredentialError,
    Grant,
    Verifier,
    plausible_nonces,
    secrets_of,
    sign,
)

GRANT = Grant(round="uid", slot=3, pod="a", pod_uid="pod-uid", start=100, since=1_000, rate=10)


def without_padding(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_what_is_signed_is_read() -> None:
    assert Verifier(["key"]).verify(sign("key", GRANT, 2_000), 1_999) == GRANT


def test_it_is_an_hmac_of_what_it_says() -> None:
    payload = without_padding(b'[1,"uid",3,"a","pod-uid",100,1000,10,2000]')
    mac = hmac.new(b"key", f"poc-callback-credential.{payload}".encode(), hashlib.sha256).digest()
    assert sign("key", GRANT, 2_000) == f"{payload}.{without_padding(mac)}"


def test_each_of_several_keys_is_good() -> None:
    credential = sign("old", GRANT, 2_000)
    assert Verifier(["new", "old"]).verify(credential, 0) == GRANT
    with pytest.raises(CredentialError, match="not signed with a key"):
        Verifier(["new"]).verify(credential, 0)
    with pytest.raises(CredentialError, match="not signed with a key"):
        Verifier([]).verify(credential, 0)


def test_one_that_was_good_expires_and_makes_no_other_good() -> None:
    verifier, credential = Verifier(["key"]), sign("key", GRANT, 2_000)
    for _ in range(2):
        assert verifier.verify(credential, 1_999) == GRANT
        with pytest.raises(CredentialError, match="it has expired"):
            verifier.verify(credential, 2_000)
        with pytest.raises(CredentialError, match="not signed"):
            verifier.verify(credential + "A", 0)


def test_what_is_known_again_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "MOST_KNOWN", 3)
    verifier = Verifier(["key"])
    for number in range(10):
        grant = dataclasses.replace(GRANT, start=number)
        assert verifier.verify(sign("key", grant, 2_000), 0) == grant
        assert len(verifier._known) <= 3


def test_it_expires() -> None:
    with pytest.raises(CredentialError, match="it has expired"):
        Verifier(["key"]).verify(sign("key", GRANT, 2_000), 2_000)


def test_no_bit_can_be_changed() -> None:
    credential = sign("key", GRANT, 2_000)
    for place in range(len(credential) - 1):  # of the last character two bits are padding
        other = "A" if credential[place] != "A" else "B"
        with pytest.raises(CredentialError):
            Verifier(["key"]).verify(credential[:place] + other + credential[place + 1 :], 0)


@pytest.mark.parametrize("text", ["", ".", "x", "é.ü", "a.b.c", "[1]."])
def test_what_is_no_credential(text: str) -> None:
    with pytest.raises(CredentialError):
        Verifier(["key"]).verify(text, 0)


def test_another_version_asks_for_an_upgrade() -> None:
    payload = without_padding(json.dumps([2, "x"]).encode())
    mac = hmac.new(b"key", f"poc-callback-credential.{payload}".encode(), hashlib.sha256).digest()
    with pytest.raises(CredentialError, match="of version 2, and this gateway knows 1: upgrade"):
        Verifier(["key"]).verify(f"{payload}.{without_padding(mac)}", 0)


def test_how_far_a_pod_can_have_come() -> None:
    assert GRANT.reach(1_000) == 100 + 10 * MARGIN_SECONDS
    assert GRANT.reach(1_060.05) == 100 + 10 * MARGIN_SECONDS + 601
    assert GRANT.reach(0) == GRANT.reach(1_000), "a clock that is behind takes nothing away"
    assert plausible_nonces(7, 10) == 7 * (10 + MARGIN_SECONDS)


def test_secrets_are_separated_by_commas() -> None:
    assert secrets_of("one") == ("one",)
    assert secrets_of(" new , old,") == ("new", "old")
    assert secrets_of(None) == ()
    for text in ("", " , "):
        with pytest.raises(ValueError, match="is empty: set one secret"):
            secrets_of(text)
