# SPDX-License-Identifier: Apache-2.0
"""The real thing, run for a test: a pod's routes, a database, an API server, a cluster."""
