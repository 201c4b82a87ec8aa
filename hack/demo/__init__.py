# SPDX-License-Identifier: Apache-2.0
"""From a bare machine, or the cluster of a kubeconfig, to a completed round."""
