# SPDX-License-Identifier: Apache-2.0
"""The template of a fleet's revision, which an update that has failed goes back to."""

from typing import Any

import pytest
from aiohttp import web

from poc_operator.apis.v1alpha1.meta import GROUPS_REVISION_LABEL
from poc_operator.clients.kube.fleet_objects import FleetObjects
from tests.support.fakes.kube_api import answering

REVISIONS = "/apis/apps/v1/namespaces/ns/controllerrevisions"
BOTH: dict[str, Any] = {"leaderTemplate": {"metadata": {}}, "workerTemplate": {"metadata": {}}}


def revision(template: Any) -> Any:  # noqa: ANN401
    return {"data": {"spec": {"template": template}}}


@pytest.mark.parametrize("key", [None, "5c6f"])
@pytest.mark.parametrize("kept", [True, False])
async def test_the_template_of_leaders_stands_for_a_revision_that_their_set_has_deleted(
    key: str | None, kept: bool
) -> None:
    own = {"metadata": {"labels": {GROUPS_REVISION_LABEL: key} if key else {}}, "spec": {}}
    of_set = {"data": {"spec": {"leaderWorkerTemplate": BOTH}}}

    async def answer(request: web.Request) -> web.Response:
        if request.path == f"{REVISIONS}/demo-1":
            return web.json_response(revision(own))
        assert (request.path, request.query["labelSelector"]) == (REVISIONS, f"{GROUPS_REVISION_LABEL}={key}")
        # The StatefulSets of leaders and workers have revisions with the label too.
        return web.json_response({"items": [revision(own), *([of_set] if kept else [])]})

    async with answering(answer) as connection:
        assert await FleetObjects(connection, "ns").template("ns", "demo-1") == (BOTH if key and kept else own)
