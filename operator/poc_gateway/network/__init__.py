# SPDX-License-Identifier: Apache-2.0
"""The routes that the network's own client calls; an init becomes a PoCRound."""
