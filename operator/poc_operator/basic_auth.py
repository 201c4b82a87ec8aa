# SPDX-License-Identifier: Apache-2.0
"""The user and the password that a round's receiver asks for, in a Secret of the type kubernetes.io/basic-auth.

They are never stored or printed: plans pass them on, and whoever sends a request puts them into it.
"""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, urlsplit

#: The only type of Secret that is read for a receiver, so that no other Secret of the namespace can be sent to one.
SECRET_TYPE = "kubernetes.io/basic-auth"  # noqa: S105 - a type
#: Characters of the user and of the password, each.
MOST_CHARACTERS = 512

_PRINTABLE = range(0x20, 0x7F)


@dataclass(frozen=True, slots=True)
class BasicAuth:
    """A user and a password: printable ASCII, no ``:`` in the user (RFC 7617, section 2). Its repr has neither."""

    username: str = field(repr=False)
    password: str = field(repr=False)

    @classmethod
    def of_secret(cls, kind: str | None, data: Mapping[str, str | bytes] | None) -> Self:
        """Read a Secret's ``type`` and ``data``, whose values are base64. ValueError says what to change."""
        if kind != SECRET_TYPE:
            raise ValueError(f"is of type {kind}: create it anew with the type {SECRET_TYPE}")
        username, password = _value(data or {}, "username"), _value(data or {}, "password")
        if ":" in username:
            raise ValueError('has a ":" in its key "username", which Basic authentication cannot send: remove it')
        return cls(username, password)

    @property
    def header(self) -> str:
        """The value of the header ``Authorization``."""
        return f"Basic {b64encode(f'{self.username}:{self.password}'.encode()).decode()}"

    def removed_from(self, text: str) -> str:
        """Return the text without the password, and without both as the header has them."""
        for secret in (self.header.removeprefix("Basic "), self.password):
            text = text.replace(secret, "***")
        return text

    def in_url(self, url: str) -> str:
        """Return the address with the user and the password in it."""
        parts = urlsplit(url)
        user = f"{quote(self.username, safe='')}:{quote(self.password, safe='')}"
        return parts._replace(netloc=f"{user}@{parts.netloc}").geturl()


def _value(data: Mapping[str, str | bytes], key: str) -> str:
    if not data.get(key):
        raise ValueError(f'has no key "{key}", or an empty one: set it')
    try:
        text = b64decode(data[key], validate=True).decode()
    except (Base64Error, UnicodeDecodeError) as error:
        raise ValueError(f'has a key "{key}" that is no text: use printable ASCII') from error
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f'has a key "{key}" of more than {MOST_CHARACTERS} characters: use a shorter one')
    if any(ord(character) not in _PRINTABLE for character in text):
        raise ValueError(
            f'has a key "{key}" with a line break or another character that is not printable ASCII: remove it, '
            "as by `printf` instead of `echo`"
        )
    return text
