# SPDX-License-Identifier: Apache-2.0
"""One look for rounds to archive as a process of its own, which a test can kill."""

import asyncio
import multiprocessing
from collections.abc import Mapping
from multiprocessing.process import BaseProcess

from poc_gateway.query import export
from poc_gateway.query.archive import Archive
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database

# Each process begins with what these import.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def archiving(url: str, environment: Mapping[str, str]) -> BaseProcess:
    """Return a process, not started yet, that archives what is due in the database at ``url``."""
    return _CONTEXT.Process(target=_sweep, args=(url, dict(environment)))


def _sweep(url: str, environment: dict[str, str]) -> None:
    database = Database.open(url)
    export.CHUNK_ROWS = 7
    asyncio.run(Archive(database, Settings.from_environment(environment)).sweep())
    database.close()
