# SPDX-License-Identifier: Apache-2.0
"""Objects in the Kubernetes API server: read, list, create, and their status, always against what was read."""
