# SPDX-License-Identifier: Apache-2.0
"""How the schema came to be; Alembic runs what is missing at every start."""
