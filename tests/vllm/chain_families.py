# SPDX-License-Identifier: Apache-2.0
"""Worker extensions that compute chains of families which keep more than keys and values, and again in another way."""

from tests.gpu.chain_checks import ChainExtension
from tests.vllm.engine_checks import EngineExtension
from tests.vllm.recurrent_checks import RecurrentExtension


class EngineChains(ChainExtension, EngineExtension):
    """PoC's extension over vLLM's own kernels."""


class RecurrentChains(ChainExtension, RecurrentExtension):
    """PoC's extension over what stands in for the kernels of linear attention."""
