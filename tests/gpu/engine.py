# SPDX-License-Identifier: Apache-2.0
"""A worker extension that compares passes with one another, and with what vLLM's own engine computes."""

from benchmarks.gpu_layer_worker import LayerExtension
from tests.vllm.engine_checks import EngineExtension


class ComparingExtension(LayerExtension, EngineExtension):
    """PoC's extension with the methods of both."""
