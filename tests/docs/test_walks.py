# SPDX-License-Identifier: Apache-2.0
"""The walks name files that exist, do not grow, and name every file that takes part."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from poc_gateway.outbox.forward import Outbox
from poc_gateway.server.process import Components, inside_app
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.pods.client import PodClient
from tests.docs.pages import ROOT
from tests.docs.walks import FOLDER, files_called, steps
from tests.support.builders import forwarding
from tests.support.builders.deliveries import a_round, artifacts, path
from tests.support.fakes.callback_receiver import callback_receiver
from tests.support.servers.fleet import RoundFleet
from tests.support.servers.pod import ARTIFACT, SLOT, running_pod

#: (page, heading or none) -> how many files a reader may need.
LONGEST = {
    ("init-generate", "To the answer"): 12,
    ("init-generate", None): 18,
    ("batch", "The plain pass"): 18,
    ("batch", "The fused pass"): 24,
    ("apply-to-complete", None): 24,
    ("delivery", None): 15,
}
#: Files that take part and tell nothing about the walk's subject.
BESIDE = {
    "image/vllm_poc/logs.py": "names for the lines of a round",
    "image/vllm_poc/server/bodies.py": "bodies are read in pieces",
    "image/vllm_poc/server/clock.py": "what time it is",
    "image/vllm_poc/server/gate.py": "whether chat is idle; it is",
    "image/vllm_poc/server/metrics.py": "counts",
    "image/vllm_poc/server/vllm_routes.py": "whether vLLM sleeps; it does not",
    "image/vllm_poc/wire/messages.py": "the base of all messages",
    "image/vllm_poc/wire/artifacts.py": "vectors as base64; and of the pods, which run in the same process here",
    "image/vllm_poc/wire/partition.py": "of the pods, too",
    "operator/poc_operator/apis/v1alpha1/conditions.py": "one condition, and how lists of them are merged",
    "operator/poc_operator/apis/v1alpha1/meta.py": "names and selectors",
    "operator/poc_operator/apis/v1alpha1/schema.py": "the base of all models",
    "operator/poc_operator/apis/v1alpha1/work.py": "which pods a spec names",
    "operator/poc_operator/clients/http.py": "answers of bounded size",
    "operator/poc_operator/rounds/ownership.py": "whose work a pod of the reference computes; these pods are ours",
    "operator/poc_operator/controller/event_loop.py": "how much begins at once",
    "operator/poc_operator/clients/pods/reference_pods.py": "pods of the reference implementation; there is none",
    "operator/poc_operator/controller/metrics.py": "counts",
    "operator/poc_operator/controller/other_rounds.py": "there is no other round",
    "operator/poc_operator/credentials.py": "how far a pod can have come; none lies",
    "operator/poc_operator/leases.py": "when leases end; none does",
    "operator/poc_operator/observed.py": "data: pods, and what they report",
    "operator/poc_operator/planning/queue.py": "no other round wants the pods",
    "operator/poc_operator/rounds/leaving.py": "no pod leaves",
    "operator/poc_operator/planning/waiting.py": "what a round waits for: nothing here",
    "operator/poc_operator/rounds/allowance.py": "the round has no number of nonces",
    "operator/poc_operator/rounds/cross_check.py": "the round has no cross-check",
    "operator/poc_operator/rounds/loss.py": "nothing is lost",
    "operator/poc_operator/rounds/rivals.py": "no two results differ",
    "operator/poc_operator/rounds/snapshot.py": "the snapshot's type for rounds",
    "operator/poc_gateway/errors.py": "what a refusal looks like; nothing is refused",
    "operator/poc_gateway/settings.py": "values",
    "operator/poc_gateway/metrics.py": "counts",
    "operator/poc_gateway/ingest/quotas.py": "how much a round may store; this one has room",
    "operator/poc_gateway/outbox/callback_ledger.py": "there is no verdict",
    "operator/poc_gateway/outbox/endings.py": "nothing expires",
    "operator/poc_gateway/outbox/rivals.py": "no two results differ",
    "operator/poc_gateway/server/telemetry.py": "the route's name for metrics and log",
    "operator/poc_gateway/outbox/states.py": "names of the states; the ledger moves between them",
    "operator/poc_gateway/store/retention.py": "whether what is old by the clock may expire; nothing is",
    "operator/poc_gateway/store/reserve.py": "whether the disk has room; it has",
    "operator/poc_gateway/server/connections.py": "how long a body may take",
    "operator/poc_gateway/store/engine.py": "how SQLite and PostgreSQL are opened",
    "operator/poc_operator/controller/untold_pods.py": "whether the watch has told of all pods; it has",
}
#: Files of a walk whose functions are not called: they are data.
DATA = {
    "image/vllm_poc/wire/callbacks.py",
    "operator/poc_gateway/store/schema.py",
    # It put the app together before the request came.
    "operator/poc_gateway/server/process.py",
    # In this test the reconciler is called without kopf, on an object in memory.
    "operator/poc_operator/handlers/objects.py",
    "operator/poc_operator/controller/manager.py",
    "operator/poc_operator/clients/kube/objects.py",
}


def _part(page: str, heading: str | None) -> list[str]:
    text = (FOLDER / f"{page}.md").read_text()
    if heading is not None:
        (text,) = [part for part in text.split("\n## ") if part.startswith(f"{heading}\n")]
    return steps(text)


@pytest.mark.parametrize(("page", "heading"), LONGEST, ids=str)
def test_a_walk_names_files_once_and_does_not_grow(page: str, heading: str | None) -> None:
    files = _part(page, heading)
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert 0 < len(files) <= LONGEST[page, heading]
    assert len(set(files)) == len(files)


def test_every_walk_has_a_bar() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"index"}
    assert pages == {page for page, _ in LONGEST}


def _compare(called: set[str], walk: list[str]) -> None:
    assert called - set(walk) - set(BESIDE) == set(), "they take part, and the walk does not name them"
    assert set(walk) - called - DATA == set(), "the walk names them, and they take no part"


@pytest.fixture
def _quick_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    version = ModuleType("vllm.version")
    version.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.version", version)
    monkeypatch.setenv("VLLM_POC_CALLBACK_INTERVAL_SECONDS", "0.01")


@pytest.mark.usefixtures("_quick_pods")
async def test_an_object() -> None:
    async with callback_receiver() as receiver, AsyncExitStack() as stack, PodClient() as client:
        fleet = RoundFleet(stack, receiver, client, stop={"afterSeconds": 1})
        for host in ("127.0.0.1", "127.0.0.2"):
            await fleet.start_pod(host)
        with files_called("operator/poc_operator", "image/vllm_poc/wire") as called:
            await fleet.reconcile_until(lambda status: status.state is State.COMPLETE)
    _compare(called, _part("apply-to-complete", None))


@pytest.mark.usefixtures("_quick_pods")
async def test_start_and_first_delivery() -> None:
    async with callback_receiver() as receiver, running_pod() as pod:
        # The first request of a server makes the service, which is not the walk's subject.
        await pod.status()
        with files_called("image/vllm_poc") as called:
            answer = await pod.start(ARTIFACT | SLOT | {"url": receiver.url})
            await forwarding.until(lambda: bool(receiver.payloads))
    assert answer.status_code == 200
    _compare(called, _part("init-generate", None))


async def test_a_delivery(tmp_path: Path) -> None:
    settings = forwarding.settings()
    async with forwarding.Receiver().served() as receiver:
        found = a_round(callbackURL=receiver.url)

        async def read_round(_namespace: str, _name: str) -> Any:  # noqa: ANN401 - a PoCRound
            return found

        with files_called("operator/poc_gateway", "image/vllm_poc/wire") as called:
            # Opened here, so that its threads are followed too.
            database = Database.open(f"sqlite:///{tmp_path}/gateway.db")
            rounds, outbox = Rounds(database, read_round), Outbox(database, settings)
            app = inside_app(Components(settings=settings, database=database, rounds=rounds, outbox=outbox))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
            async with http, forwarding.running(outbox):
                called.clear()
                answer = await http.post(path(), content=artifacts(range(4)))
                await forwarding.until(lambda: bool(receiver.accepted))
        database.close()
    assert answer.status_code == 200
    _compare(called, _part("delivery", None))
