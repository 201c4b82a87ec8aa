# SPDX-License-Identifier: Apache-2.0
"""The gateway: a durable collector of what pods deliver, and the network's own routes in front of the cluster."""
