# SPDX-License-Identifier: Apache-2.0
"""A folder that vLLM serves chat from: a real model's shape, and a tokenizer of as many words. No weights."""

import json
from pathlib import Path

from benchmarks.gpu_shapes import write_shape
from hack.models.store import CORPUS
from hack.models.tokenizer import write_tokenizer


def write_model(shape: str, folder: Path, *, layers: int | None = None, ranks: int = 1) -> Path:
    """Write configuration and tokenizer into ``folder`` and return it."""
    config = write_shape(shape, folder, layers=layers, ranks=ranks)
    write_tokenizer(CORPUS, folder)
    _add_words(folder / "tokenizer.json", config["vocab_size"])
    return folder


def _add_words(tokenizer: Path, size: int) -> None:
    """Give every id of the model a word, so that each token that it draws becomes text, as with a real one."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    words |= {f"Ġword{number}": number for number in range(len(words), size)}
    tokenizer.write_text(json.dumps(content), encoding="utf-8")
