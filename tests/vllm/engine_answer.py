# SPDX-License-Identifier: Apache-2.0
"""A nonce is what vLLM's engine makes of it as a prompt; for servers with `tests.vllm.engine_checks`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import torch

from tests.vllm.client import K_DIM, ROUND

if TYPE_CHECKING:
    from tests.vllm.client import Client

#: Most nonces have no token twice.
TRIES = 100
BLOCK_HASH, PUBLIC_KEY = str(ROUND["block_hash"]), str(ROUND["public_key"])


def expect_engines_answer(client: Client, seq_len: int, *, tolerance: float, other: float) -> None:
    """Compare a nonce with the engine's answer: alone and among others it is within ``tolerance``.

    Another nonce must be more than ``other`` away.
    """
    nonce, prompt = _prompt(client, seq_len)
    client.complete(prompt)
    expected = torch.tensor(client.worker("poc_test_answer", BLOCK_HASH, PUBLIC_KEY, nonce, K_DIM))
    alone, among = (client.artifacts(nonces, seq_len=seq_len) for nonces in ([nonce], [nonce + 7, nonce, nonce + 9]))
    for found in (alone[0], among[1]):
        torch.testing.assert_close(torch.tensor(found), expected, atol=tolerance, rtol=0)
    away = torch.tensor(among[0]) - expected
    assert away.abs().max() > other


def _prompt(client: Client, seq_len: int) -> tuple[int, list[int]]:
    """Return the first nonce without a token that occurs twice, as a prompt."""
    for nonce in range(TRIES):
        with suppress(HTTPError):
            return nonce, client.worker("poc_test_prompt", BLOCK_HASH, PUBLIC_KEY, nonce, seq_len)
    raise AssertionError(
        f"none of {TRIES} nonces is a prompt of {seq_len} different tokens, or the server's log says why"
    )
