# SPDX-License-Identifier: Apache-2.0
"""Prose is plain: short sentences, the field's words, and no word that the glossary replaced."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages

#: Words in a sentence, at most. Code and numbers count as one word each.
LONGEST = 25
#: Words of ours that the field has another word for.
REPLACED = ("recipe", "rehears", "strays", "hungry", "portion", "deaf", "letters", "plain way", "hot card", "re-issue")

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
#: A dead letter is the field's own term.
_ALLOWED = re.compile(r"dead[ -]letters?|letters, digits", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose: no fences, no tables' rulers, each cell and list item by itself."""
    text = _COMMENT.sub("", _FENCE.sub("", text))
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    text = re.sub(r"(?<=\d) (?=\d{3}\b)", "", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)|\n(?=\|)|\|", text)
    return [
        " ".join(sentence.split())
        for block in blocks
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=:)\s*\n", block)
        if sentence.strip()
    ]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'-]+", sentence))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    assert [f"{words(s)}: {s}" for s in sentences(page.read_text()) if words(s) > LONGEST] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_words_are_the_fields(page: Path) -> None:
    text = _ALLOWED.sub("", page.read_text()).lower()
    assert [word for word in REPLACED if word in text] == []
