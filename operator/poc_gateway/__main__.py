# SPDX-License-Identifier: Apache-2.0
"""``python -m poc_gateway``: run the gateway, archive a round, or copy the SQLite database and put the copy back."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import ConfigException
from pydantic import ValidationError

from poc_gateway.node_api.ml_nodes import MlNode
from poc_gateway.server.process import leave, run
from poc_gateway.settings import Settings
from poc_gateway.store import backup
from poc_gateway.store.engine import DatabaseError
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.kube.connection import connect
from poc_operator.clients.kube.labelled_rounds import LabelledRounds
from poc_operator.clients.kube.objects import ObjectStore
from vllm_poc import logs

_log = logging.getLogger("poc_gateway")

Result = TypeVar("Result")


async def _run(settings: Settings) -> None:
    client, _ = await connect()
    store = ObjectStore(client)
    try:
        await run(
            settings,
            partial(store.get, PoCRound),
            partial(_cluster, client),
            store.basic_auth,
            partial(store.list_bodies, namespaces=settings.watch_namespaces),
        )
    finally:
        await store.close()


def _cluster(client: ApiClient, ml_node: MlNode) -> LabelledRounds:
    return LabelledRounds(client, ml_node.template.namespace, ml_node.labels)


def _settings() -> Settings:
    try:
        return Settings.from_environment(os.environ)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = f"{first['loc'][0]}: " if first["loc"] else ""
        raise ValueError(f"{where}{first['msg'].removeprefix('Value error, ')}; correct the environment") from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m poc_gateway", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("run", help="run the gateway (the default)")
    copying = commands.add_parser("backup", help="copy the SQLite database, also while a gateway uses it")
    copying.add_argument("file", metavar="DEST", help="a file that is not there yet, or - for standard output")
    restoring = commands.add_parser("restore", help="put a copy in the place of the SQLite database")
    restoring.add_argument("file", metavar="SOURCE", help="the copy, or - for standard input")
    restoring.add_argument("--replace", action="store_true", help="keep a database that is there as NAME.replaced")
    archiving = commands.add_parser("archive", help="write a round to the archive, also while a gateway runs")
    archiving.add_argument("round", metavar="ROUND", help="NAMESPACE/NAME of a round that has ended, or its uid")
    return parser.parse_args()


def _run_until_done(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it in uvloop, which every signal wakes; asyncio's loop may sleep on after one that came to another thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _perform(arguments: argparse.Namespace, settings: Settings) -> None:
    if arguments.command == "archive":
        from poc_gateway.query import archive  # noqa: PLC0415 - a gateway starts sooner without it

        _log.info("the round is archived: %s", _run_until_done(archive.by_hand(settings, arguments.round)).uri)
        return
    url, file = settings.database.get_secret_value(), arguments.file
    if arguments.command == "backup":
        _log.info("the database is copied: %d bytes", backup.back_up(url, file))
    else:
        _log.info("the database is restored: %d bytes", backup.restore(url, file, replace=arguments.replace))


def main() -> None:
    """Read the settings and do what the arguments say: run until told to stop, unless they name another command."""
    logs.configure()
    arguments, settings, status = _arguments(), None, 0
    try:
        settings = _settings()
        logs.configure(settings.log_format)
        if arguments.command in ("archive", "backup", "restore"):
            _perform(arguments, settings)
        else:
            _run_until_done(_run(settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        # What a timeout cancels in the moment of the signal ends as cancelled. Past `leave`, Python would wait for S3.
        status = 128 + signal.SIGINT
    except (ValueError, DatabaseError, ConfigException, OSError) as error:
        what = "cannot run" if arguments.command in (None, "run") else f"cannot {arguments.command}"
        _log.error("the gateway %s: %s", what, error)
        status = 1
    except Exception:
        _log.exception("the gateway has failed")
        status = 1
    if settings is not None:
        leave(settings, status)
    sys.exit(status)


if __name__ == "__main__":
    main()
