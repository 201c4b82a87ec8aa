# SPDX-License-Identifier: Apache-2.0
"""What the tests ask a server: greedy chat, PoC, and their own worker methods."""

import base64
import json
import struct
import time
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.checks.metrics import parse_pod
from tests.support.patience import PATIENCE
from vllm_poc.rpc import DecodeRequest
from vllm_poc.wire.messages import API_PREFIX

REQUEST_SECONDS = 60 * PATIENCE
ROUND = {"block_hash": "b10c", "block_height": 7, "public_key": "key"}
K_DIM = 12
#: A text, or parts of a message such as images.
Prompt: TypeAlias = str | list[dict[str, Any]]


def chat_body(model: str, prompt: Prompt, tokens: int) -> dict[str, Any]:
    """Return the request of a greedy answer of exactly so many tokens, with their ids."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def chain_request(
    nonces: Sequence[int],
    forced: Sequence[Sequence[int]] = (),
    *,
    seq_len: int,
    steps: int,
    parts: int = 5,
    cut: int = 1,
    segments: int = 1,
) -> DecodeRequest:
    """Return the request for chains of the round that the tests' client asks for."""
    return DecodeRequest(
        block_hash=str(ROUND["block_hash"]),
        public_key=str(ROUND["public_key"]),
        nonces=list(nonces),
        seq_len=seq_len,
        max_tokens=steps,
        forced=[list(claim) for claim in forced],
        parts=parts,
        cuts={"prefill": cut, "step": cut, "graph": segments},
    )


class Client:
    """Talks to one server, with ``key`` as the bearer token if there is one."""

    def __init__(self, base: str, model: str, log: Path, key: str | None = None) -> None:
        self.log = log
        self.base = base
        self._model = model
        self._key = key

    def with_key(self, key: str | None) -> "Client":
        """Return a client of the same server that sends another key, or none."""
        return Client(self.base, self._model, self.log, key)

    def chat(self, prompt: Prompt, *, tokens: int = 24, model: str | None = None) -> list[int]:
        """Return the token ids of the greedy answer, of another ``model`` if the server has several."""
        answer = self._post("/v1/chat/completions", chat_body(model or self._model, prompt, tokens))
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def stream_chat(self, prompt: str, *, tokens: int = 24) -> list[int]:
        """Return the token ids of the greedy answer, as they arrive one after the other."""
        ids: list[int] = []
        with self._open("/v1/chat/completions", chat_body(self._model, prompt, tokens) | {"stream": True}) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[len(b"data: ") :])["choices"]:
                        ids += choice.get("token_ids") or []
        return ids

    def complete(self, prompt: Sequence[int]) -> None:
        """Let the engine read these tokens and answer with one."""
        self._post("/v1/completions", {"model": self._model, "prompt": list(prompt), "max_tokens": 1})

    def artifacts(self, nonces: Sequence[int], *, seq_len: int = 64, **fields: Any) -> list[list[float]]:  # noqa: ANN401
        """Return the artifact of each nonce."""
        params = {"model": self._model, "seq_len": seq_len, "k_dim": K_DIM}
        answer = self.generate(nonces=list(nonces), params=params, **fields)
        return [decode(artifact["vector_b64"]) for artifact in answer["artifacts"]]

    def distances(self, nonces: Sequence[int], *, seq_len: int = 64, **fields: Any) -> list[float]:  # noqa: ANN401
        """Return the distance of each nonce."""
        answer = self.generate(nonces=list(nonces), r_target=1.4, seq_len=seq_len, **fields)
        found: list[float] = answer["distances"]
        return found

    def generate(self, **fields: Any) -> Any:  # noqa: ANN401
        """Post to ``generate`` and wait for the answer."""
        return self.poc("generate", {**ROUND, "wait": True, **fields})

    def start(self, **fields: Any) -> Any:  # noqa: ANN401
        """Post to ``init/generate`` an artifact round, unless ``fields`` say otherwise."""
        params = {"model": self._model, "seq_len": 64, "k_dim": K_DIM}
        body = {**ROUND, "node_id": 0, "node_count": 1, "batch_size": 8, "params": params, **fields}
        return self.poc("init/generate", {name: value for name, value in body.items() if value is not None})

    def stop(self) -> Any:  # noqa: ANN401
        """Stop the round."""
        return self.poc("stop", {})

    def status(self) -> Any:  # noqa: ANN401
        """Return the PoC status."""
        with self._open(f"{API_PREFIX}/status") as answer:
            return json.load(answer)

    def versions(self) -> Any:  # noqa: ANN401
        """Return what runs there."""
        with self._open(f"{API_PREFIX}/versions") as answer:
            return json.load(answer)

    def metrics(self) -> dict[str, float]:
        """Return the ``poc_*`` series of vLLM's /metrics."""
        with urllib.request.urlopen(f"{self.base}/metrics", timeout=REQUEST_SECONDS) as answer:  # noqa: S310
            return parse_pod(answer.read().decode(), self._model)

    def metric(self, name: str) -> float:
        """Return the sum of one of vLLM's own series."""
        with urllib.request.urlopen(f"{self.base}/metrics", timeout=REQUEST_SECONDS) as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def forget_prompts(self, *, everywhere: bool = False) -> None:
        """Drop the keys and values of earlier chats from the GPU; ``everywhere`` also those that a KV connector has."""
        end = time.monotonic() + REQUEST_SECONDS
        # It fails while blocks are on their way to the connector.
        while not self._post(f"/reset_prefix_cache?reset_external={str(everywhere).lower()}", {})["success"]:
            assert time.monotonic() < end, "the engine holds blocks of a chat that is over"
            time.sleep(0.1)

    def job(self, request_id: str) -> Any:  # noqa: ANN401
        """Return the state or the result of queued work."""
        with self._open(f"{API_PREFIX}/generate/{request_id}") as answer:
            return json.load(answer)

    def poc(self, route: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """Post to a PoC route."""
        return self._post(f"{API_PREFIX}/{route}", body)

    def worker(self, method: str, *args: object) -> Any:  # noqa: ANN401
        """Call a worker's method and return the only answer."""
        (result,) = self.workers(method, *args)
        return result

    def workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of all workers and return their answers, by rank."""
        results: list[Any] = self._post("/collective_rpc", {"method": method, "args": args})["results"]
        return results

    def computed(self, request: Mapping[str, Any]) -> tuple[Any, int]:
        """Let the workers compute the request; return the answer, or the error, and how many calls that took."""
        for calls in count(1):
            answer = next(found for found in self.workers("poc_compute", request) if found is not None)
            if answer.get("complete", True):
                return answer, calls
        raise AssertionError  # unreachable: counting has no end

    def is_healthy(self) -> bool:
        """Whether vLLM says that its engine lives."""
        try:
            with urllib.request.urlopen(f"{self.base}/health", timeout=REQUEST_SECONDS):  # noqa: S310
                return True
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        with self._open(path, body) as answer:
            return json.load(answer)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.base + path, data, headers)  # noqa: S310
        return urllib.request.urlopen(request, timeout=REQUEST_SECONDS)  # noqa: S310


def decode(vector_b64: str) -> list[float]:
    """Return the numbers of an artifact."""
    return list(struct.unpack(f"<{K_DIM}e", base64.b64decode(vector_b64)))
