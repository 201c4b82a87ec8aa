# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_poc serve MODEL``: see `vllm_poc.cli`."""

from vllm_poc.cli import main

# vLLM's child processes import this module under another name.
if __name__ == "__main__":
    main()
