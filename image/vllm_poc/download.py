# SPDX-License-Identifier: Apache-2.0
"""Downloads a model's files from Hugging Face into the cache that vLLM reads, and tells over HTTP how far that is.

It runs in a container of its own, before pods need the model. What is there already is not downloaded again.
"""

import argparse
import importlib
import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_poc.logs import get_logger

#: Weights in formats that vLLM takes only where there are no safetensors.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite")
_SAFETENSORS = ".safetensors"
#: A folder of many models with the same weights in the form of their authors; vLLM leaves it out too.
_ORIGINAL = "original/"
_LONGEST = 1_000

_log = get_logger(__name__)


class DownloadError(Exception):
    """One sentence that says what is wrong."""


def main(words: Sequence[str]) -> None:
    """Download, and return when all is there. DownloadError if it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m vllm_poc download", description=__doc__)
    parser.add_argument("model", help="hub id, such as Qwen/Qwen3-8B")
    parser.add_argument("--revision", help="branch, tag or commit; the default branch without it")
    parser.add_argument("--port", type=int, default=8000, help="port that tells the progress (8000)")
    options = parser.parse_args(words)
    hub = importlib.import_module("huggingface_hub")
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        sizes, blobs = _plan(hub, options.model, options.revision)
        with _ProgressServer(options.port, Progress(_blobs_folder(options.model), blobs)):
            _log.info("%s: %d files, %d bytes", options.model, len(sizes), sum(sizes.values()))
            hub.snapshot_download(options.model, revision=options.revision, allow_patterns=[*sizes])
    except Exception as error:  # of all kinds: the network, the hub, the disk
        raise DownloadError(_sentence(options.model, error)) from error


def _sentence(model: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason is given"
    return f"{model} cannot be downloaded: {type(error).__name__}: {text}"[:_LONGEST]


def _plan(hub: Any, model: str, revision: str | None) -> tuple[Mapping[str, int], Mapping[str, int]]:  # noqa: ANN401 - huggingface_hub
    """Return the sizes in bytes of the files to download, and of the blobs that they become, by their names."""
    files = hub.HfApi().model_info(model, revision=revision, files_metadata=True).siblings or []
    names = wanted(file.rfilename for file in files)
    chosen = [file for file in files if file.rfilename in names]
    blobs = {(file.lfs.sha256 if file.lfs is not None else file.blob_id) or "": file.size or 0 for file in chosen}
    return {file.rfilename: file.size or 0 for file in chosen}, blobs


def wanted(names: Iterable[str]) -> set[str]:
    """Return the files that vLLM needs: all except weights in other forms beside safetensors."""
    found = {name for name in names if not name.startswith(_ORIGINAL)}
    if not any(name.endswith(_SAFETENSORS) for name in found):
        return found
    return {name for name in found if not name.endswith(_OTHER_WEIGHTS)}


def _blobs_folder(model: str) -> Path:
    cache: str = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
    return Path(cache) / f"models--{model.replace('/', '--')}" / "blobs"


class Progress:
    """How much of the blobs is in the cache's folder. A file of one that is under way begins with the blob's name."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder = folder
        self._sizes = sizes

    def told(self) -> dict[str, int]:
        """Return the bytes that are there, and all of them."""
        found = dict.fromkeys(self._sizes, 0)
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            blob = path.name.partition(".")[0]
            if blob in found:
                found[blob] = max(found[blob], _size(path))
        done = sum(min(size, self._sizes[blob]) for blob, size in found.items())
        return {"done": done, "total": sum(self._sizes.values())}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was renamed this moment
        return 0


class _ProgressServer:
    """Answers every GET with the progress, as long as the context lasts."""

    def __init__(self, port: int, progress: Progress) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                body = json.dumps(progress.told()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing: the last line of the log is why the download failed."""

        self._server = ThreadingHTTPServer(("", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def run(words: Sequence[str]) -> None:
    """Do what ``main`` does; exit status 1 with one sentence if it fails."""
    try:
        main(words)
    except DownloadError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command line program
        sys.exit(1)
