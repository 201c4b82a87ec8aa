# SPDX-License-Identifier: Apache-2.0
"""What runs inside vLLM's API server process: the REST routes and the round that they steer."""
