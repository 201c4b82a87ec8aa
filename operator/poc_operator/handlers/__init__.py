# SPDX-License-Identifier: Apache-2.0
"""kopf's handlers. They translate between kopf and ``controller`` and decide nothing."""
