# SPDX-License-Identifier: Apache-2.0
"""A real one-node Kubernetes cluster as ordinary processes of this machine (standard library only)."""
