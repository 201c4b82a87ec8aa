# SPDX-License-Identifier: Apache-2.0
"""The rounds that the gateway knows: what their PoCRounds say, and where their rows are."""
