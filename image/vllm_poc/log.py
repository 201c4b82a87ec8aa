# SPDX-License-Identifier: Apache-2.0
"""Loggers that belong to vLLM's."""

import logging


def get_logger(module: str) -> logging.Logger:
    """Return a module's logger.

    Its name lies below ``vllm``, the only tree that vLLM configures: there it has vLLM's format, and obeys
    VLLM_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH. Beside it, INFO would vanish.
    """
    return logging.getLogger(f"vllm.{module}")
