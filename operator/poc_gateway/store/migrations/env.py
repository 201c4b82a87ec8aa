# SPDX-License-Identifier: Apache-2.0
"""Runs migrations on the connection that `poc_gateway.store.migrations.migrate` brings along."""

from alembic import context

from poc_gateway.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
