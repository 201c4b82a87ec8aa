# SPDX-License-Identifier: Apache-2.0
"""How the schema came to be: one script of Alembic per change under ``versions``; `migrate` runs what is missing.

A script is never changed once it is released; `poc_gateway.store.schema` is what all of them make together.
"""

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Engine

from poc_gateway.store.engine import DatabaseUnavailable

_SCRIPTS = Path(__file__).parent


def migrate(engine: Engine) -> None:
    """Run the migrations that the database lacks; DatabaseUnavailable if a newer gateway has made it."""
    # One line per migration and none about what it is for.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    head = ScriptDirectory.from_config(config).get_current_head()
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        message = f"the database is not of this gateway, whose schema is {head} ({error}): use a newer gateway"
        raise DatabaseUnavailable(message) from error
