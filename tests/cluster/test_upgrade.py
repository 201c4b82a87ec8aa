# SPDX-License-Identifier: Apache-2.0
"""A running round does not notice that the operator's chart is upgraded under it, or rolled back.

The chart has had one version so far. Its previous version is thus this chart under an older number, with a CRD that
lacks a column, and pods with another annotation: all that helm changes is changed, and operator and gateway restart.

make test-upgrade
"""

import shutil
from collections.abc import Callable
from operator import gt
from pathlib import Path

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART, operator_values
from hack.deploy.releases import GATEWAY, NAMESPACE, OPERATOR, SYSTEM_NAMESPACE
from hack.toolchain.common import run
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.cluster.gateway import results_of
from tests.cluster.objects import ARTIFACT, Rounds, is_running
from tests.cluster.results import indices_by_slot
from tests.support.fakes.receiver import Receiver
from tests.support.servers.cluster import ready

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(480, func_only=True)]

CRD = "pocrounds.poc.gonka.ai"
COLUMN = "Degraded"
ANNOTATION = "example.org/chart"
OLDER = "0.0.1"


def previous_chart(folder: Path) -> Path:
    """Copy the chart as its previous version: another number, and a CRD without one column."""
    chart = folder / OPERATOR_CHART.name
    shutil.copytree(OPERATOR_CHART, chart)
    about = chart / "Chart.yaml"
    lines = about.read_text().splitlines(keepends=True)
    about.write_text("".join(f"version: {OLDER}\n" if line.startswith("version:") else line for line in lines))
    crd = chart / "files" / "crds" / "poc.gonka.ai_pocrounds.yaml"
    text = crd.read_text()
    older = text.replace(f"name: {COLUMN}\n", f"name: {COLUMN}-before\n", 1)
    assert older != text
    crd.write_text(older)
    return chart


def columns(kube: Kube) -> list[str]:
    versions = kube.get("crd", CRD)["spec"]["versions"]
    return [column["name"] for version in versions for column in version["additionalPrinterColumns"]]


def pods(kube: Kube) -> set[str]:
    """Return the uids of the operator's and the gateway's pods."""
    return {pod["metadata"]["uid"] for pod in kube.get("-n", SYSTEM_NAMESPACE, "pods")["items"]}


def change(kube: Kube, change_release: Callable[[], object]) -> None:
    """Change the release, and wait until none of its pods is one of before."""
    before = pods(kube)
    change_release()
    for name in (OPERATOR, GATEWAY):
        kube.kubectl("-n", SYSTEM_NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=120s", limit=130)
    ready(kube)
    assert not before & pods(kube)


def install(kube: Kube, chart: Path, note: str) -> None:
    values = operator_values(NAMESPACE)
    kube.helm_install(OPERATOR, chart, SYSTEM_NAMESPACE, {**values, "podAnnotations": {ANNOTATION: note}})


def roll_back(kube: Kube) -> None:
    run([kube.helm_path, "rollback", OPERATOR, "--namespace", SYSTEM_NAMESPACE], limit=60, env=kube.environment)


def goes_on(rounds: Rounds, name: str, since: PoCRound) -> PoCRound:
    """Wait until every slot has delivered more than ``since``."""
    then = [slot.delivered for slot in since.status.assignments]
    return rounds.wait_until(name, lambda now: all(map(gt, [s.delivered for s in now.status.assignments], then)))


def test_a_round_runs_on_through_upgrade_and_rollback(
    kube: Kube, rounds: Rounds, receiver: Receiver, tmp_path: Path
) -> None:
    older = previous_chart(tmp_path)
    try:
        change(kube, lambda: install(kube, older, "older"))
        assert COLUMN not in columns(kube)
        rounds.apply("upgraded", **ARTIFACT, callbackURL=receiver.url)
        begun = rounds.wait_until("upgraded", is_running)
        rounds.apply("queued", **ARTIFACT, stop={"afterNonces": 200})
        rounds.wait_for_reason("queued", "Progressing", "PodsBusy")

        change(kube, lambda: install(kube, OPERATOR_CHART, "newer"))
        assert COLUMN in columns(kube)
        upgraded = goes_on(rounds, "upgraded", rounds.get("upgraded"))
        change(kube, lambda: roll_back(kube))
        assert COLUMN not in columns(kube)
        goes_on(rounds, "upgraded", upgraded)

        rounds.patch("upgraded", finish=True)
        rounds.wait("upgraded", "condition=Complete")
        done = rounds.settled("upgraded")
        rounds.wait("queued", "condition=Complete")
    finally:
        change(kube, lambda: install(kube, OPERATOR_CHART, "current"))
    # The same servers, which began once and at the beginning: nothing was computed again.
    assert [slot.session for slot in done.status.assignments] == [slot.session for slot in begun.status.assignments]
    assert [(slot.attempts, slot.start) for slot in done.status.assignments] == [(1, 0), (1, 0)]
    assert done.status.totals.retries == 0
    for slot, indices in indices_by_slot(done, receiver):
        assert sorted(set(indices)) == list(range(slot.next)) == list(range(slot.delivered))
    with results_of(kube) as client:
        stored = client.get(f"/rounds/{NAMESPACE}/upgraded/progress").json()
    assert (stored["stored"], stored["conflicts"]) == (done.status.totals.delivered, 0)
