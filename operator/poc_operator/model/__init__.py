# SPDX-License-Identifier: Apache-2.0
"""The objects that the operator reasons about: rounds, their status, pods. Data only, no I/O."""
