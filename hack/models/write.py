# SPDX-License-Identifier: Apache-2.0
"""Write all tiny models into a folder; runs in the worker environment."""

import sys
from pathlib import Path

from hack.models.tokenizer import write_tokenizer
from hack.models.weights import MODELS, write_weights


def write_models(corpus: Path, target: Path) -> None:
    """Write each model into a folder of its name under ``target``."""
    for name in MODELS:
        folder = target / name
        folder.mkdir(parents=True)
        write_weights(name, folder)
        write_tokenizer(corpus, folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # a pod reads them as another user


if __name__ == "__main__":
    write_models(Path(sys.argv[1]), Path(sys.argv[2]))
