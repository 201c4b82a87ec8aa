# SPDX-License-Identifier: Apache-2.0
"""``python -m poc_gateway``: run the gateway."""

import asyncio
import logging
import os
import sys
from functools import partial

import uvloop
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import ConfigException
from pydantic import ValidationError

from poc_gateway.node_api.ml_nodes import MlNode
from poc_gateway.server.process import run
from poc_gateway.settings import Settings
from poc_gateway.store.engine import DatabaseError
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.kube.connection import connect
from poc_operator.clients.kube.labelled_rounds import LabelledRounds
from poc_operator.clients.kube.objects import ObjectStore
from vllm_poc import logs


async def _run(settings: Settings) -> None:
    client, _ = await connect()
    store = ObjectStore(client)
    try:
        await run(settings, partial(store.get, PoCRound), partial(_cluster, client), store.basic_auth)
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


def main() -> None:
    """Read the settings and run until told to stop."""
    logs.configure()
    try:
        settings = _settings()
        logs.configure(settings.log_format)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except (ValueError, DatabaseError, ConfigException, OSError) as error:
        logging.getLogger("poc_gateway").error("the gateway cannot run: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
