# SPDX-License-Identifier: Apache-2.0
"""The operator's moving parts: what it knows of pods, and the loop that drives each round."""
