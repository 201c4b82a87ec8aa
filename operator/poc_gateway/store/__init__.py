# SPDX-License-Identifier: Apache-2.0
"""The database: its schema, its migrations, and the two ways to use it, `write` and `read`."""
