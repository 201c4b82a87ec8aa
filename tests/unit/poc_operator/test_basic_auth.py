# SPDX-License-Identifier: Apache-2.0
"""Users and passwords of receivers: what a Secret must have, and how they are sent."""

from base64 import b64encode

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AnyHttpUrl
from yarl import URL

from poc_operator.basic_auth import MOST_CHARACTERS, SECRET_TYPE, BasicAuth

_PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=40)


def encoded(username: str, password: str | None = None) -> dict[str, str | bytes]:
    """The data of a Secret."""
    values = {"username": username, "password": password}
    return {key: b64encode(value.encode()).decode() for key, value in values.items() if value is not None}


@given(_PRINTABLE.filter(lambda text: ":" not in text), _PRINTABLE)
def test_what_a_secret_has_is_what_a_pod_sends(username: str, password: str) -> None:
    auth = BasicAuth.of_secret(SECRET_TYPE, encoded(username, password))
    url = str(AnyHttpUrl(auth.in_url("http://[fd00::1]:8080/poc/a%20b")))
    # A pod's HTTP client takes both from the address like this.
    sent = aiohttp.BasicAuth.from_url(URL(url))
    assert sent is not None
    assert (sent.login, sent.password) == (username, password)
    assert sent.encode() == auth.header
    assert str(URL(url).with_user(None)) == "http://[fd00::1]:8080/poc/a%20b"


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("Opaque", encoded("u", "p"), f"type Opaque: create it anew with the type {SECRET_TYPE}"),
        (None, None, "of type None"),
        (SECRET_TYPE, None, 'no key "username"'),
        (SECRET_TYPE, encoded("u"), 'no key "password", or an empty one: set it'),
        (SECRET_TYPE, encoded("", "p"), 'no key "username", or an empty one'),
        (SECRET_TYPE, encoded("a:b", "p"), 'has a ":" in its key "username"'),
        (SECRET_TYPE, encoded("u", "secret\n"), 'key "password" with a line break'),
        (SECRET_TYPE, encoded("ü", "p"), 'key "username" with a line break or another character'),
        (SECRET_TYPE, {"username": "dQ==", "password": "/w=="}, 'key "password" that is no text'),
        (SECRET_TYPE, encoded("u", "p" * (MOST_CHARACTERS + 1)), "more than 512 characters"),
    ],
)
def test_an_unfit_secret_is_explained(kind: str | None, data: dict[str, str | bytes] | None, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        BasicAuth.of_secret(kind, data)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_nothing_of_it_is_printed() -> None:
    auth = BasicAuth("operator", "s3cret")
    assert "s3cret" not in repr(auth)
    assert "operator" not in repr(auth)
