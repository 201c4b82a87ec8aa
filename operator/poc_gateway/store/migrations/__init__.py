# SPDX-License-Identifier: Apache-2.0
"""How the schema came to be: one script of Alembic per change under ``versions``; `migrate` runs what is missing.

Gateways of the release before may still use a PostgreSQL meanwhile, and after it: a script may add, and what nobody
uses any more is removed a release later.

A script is never changed once it is released; `poc_gateway.store.schema` is what all of them make together.
"""

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, text

from poc_gateway.store.engine import DatabaseUnavailable

_SCRIPTS = Path(__file__).parent
#: Of PostgreSQL; another number than that of the owner's lock (`poc_gateway.store.fence`).
_LOCK = 0x706F_635F_6D69


def is_newest(connection: Connection) -> bool:
    """Whether the database has the schema of this gateway."""
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    head = ScriptDirectory.from_config(config).get_current_head()
    return MigrationContext.configure(connection).get_current_revision() == head


def migrate(engine: Engine) -> None:
    """Run the migrations that the database lacks; DatabaseUnavailable if a newer gateway has made it."""
    # One line per migration and none about what it is for.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    head = ScriptDirectory.from_config(config).get_current_head()
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                # Several gateways may begin at once: one migrates, and the others find that it is done.
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        message = f"the database is not of this gateway, whose schema is {head} ({error}): use a newer gateway"
        raise DatabaseUnavailable(message) from error
