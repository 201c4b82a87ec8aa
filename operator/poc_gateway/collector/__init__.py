# SPDX-License-Identifier: Apache-2.0
"""What pods deliver: checked, stored once, answered when durable."""
