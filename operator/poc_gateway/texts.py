# SPDX-License-Identifier: Apache-2.0
"""Texts of others, made fit to be stored and logged."""


def one_line(text: str) -> str:
    """Return the text as one line of printable characters.

    PostgreSQL refuses NUL in a text, and no database takes half a surrogate pair; the log is one line per event.
    """
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())
