# SPDX-License-Identifier: Apache-2.0
"""A reader follows the pages on a real cluster: the quick start first, the removal last."""

import re
from collections.abc import Iterator

import pytest
import yaml

from hack.generate.runbooks import read
from tests.docs.pages import CLUSTER_PAGES, ROOT, TRANSCRIPT, Block, blocks
from tests.docs.reader import SECONDS, WORK, Reader, empty, reader
from tests.docs.schemas import example_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2 * SECONDS, func_only=True)]

FIRST, *BETWEEN, LAST = CLUSTER_PAGES


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    found = reader(tmp_path_factory.mktemp("reader"))
    yield found
    empty(found)


def test_the_quick_start_ends_with_results(follower: Reader) -> None:
    printed = follower.read(FIRST)
    found = follower.kube.get("--namespace", WORK, "pocround", "round-1")["status"]
    conditions = {condition["type"]: condition["status"] for condition in found["conditions"]}
    assert conditions["Complete"] == "True"
    assert conditions["Degraded"] == "False", found
    assert found["totals"]["valid"] == found["totals"]["checked"] > 0
    csv = [line for line in printed.splitlines() if line.count(",") > 1 and line[0].isdigit()]
    assert len(csv) >= 5, printed


def _manifests() -> list[tuple[str, str]]:
    """Every manifest of the pages and of docs/examples, with the place where it stands."""
    manifests = (b for b in blocks() if b.language == "yaml" and re.search("^kind:", b.text, re.MULTILINE))
    shown = [(b.where, b.text) for b in manifests if b.kind != "none"]
    return shown + [(str(path.relative_to(ROOT)), path.read_text()) for path in example_files()]


@pytest.mark.parametrize(("where", "text"), _manifests(), ids=[where for where, _ in _manifests()])
def test_the_api_server_takes_every_manifest(where: str, text: str, follower: Reader) -> None:
    for document in yaml.safe_load_all(text):
        # A name of its own: a change of a present round would be judged by other rules.
        document["metadata"]["name"] += "-new"
        dry = ("--namespace", WORK, "apply", "--dry-run=server", "--filename", "-")
        follower.kube.kubectl(*dry, stdin=yaml.safe_dump(document))


def _refused() -> tuple[Block, Block]:
    """The block that the API server refuses, and the transcript of its answer."""
    (manifest,) = (block for block in blocks() if block.title == "bad.yaml")
    (transcript,) = (b for b in blocks() if b.language == TRANSCRIPT and "apply --dry-run=server -f bad.yaml" in b.text)
    return manifest, transcript


def test_the_api_server_says_what_the_page_shows(follower: Reader) -> None:
    manifest, transcript = _refused()
    (follower.folder / "bad.yaml").write_text(manifest.text)
    answer = follower.run("kubectl -n poc apply --dry-run=server -f bad.yaml 2>&1 || true")
    # The API server lists the faults in no fixed order.
    assert sorted(_lines(answer)) == sorted(_lines(transcript.text.partition("\n")[2]))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


#: Runs a command of a runbook that changes something as the API server would, and changes nothing.
_RUNBOOK = """set -euo pipefail
SYSTEM=poc-system NAMESPACE=poc OBJECT=pocround/round-1 FLEET=qwen3-8b POD=qwen3-8b-0
kubectl() {
    case " $* " in
        *" delete "* | *" patch "*) command kubectl "$@" --dry-run=server ;;
        " cordon "*) command kubectl "$@" --dry-run=server ;;
        *) command kubectl "$@" ;;
    esac
}
helm() { command helm "$@" --dry-run=server >/dev/null; }
command kubectl -n $SYSTEM port-forward service/vllm-poc-operator-gateway 18080:8080 >/dev/null &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
TOKEN=$(kubectl -n $SYSTEM get secret vllm-poc-operator-gateway-tokens -o jsonpath='{.data.token}' | base64 -d)
gateway() {
    curl -sS --fail --retry 5 --retry-connrefused -H "Authorization: Bearer $TOKEN" "localhost:18080$1" "${@:2}"
}
"""


def test_the_commands_of_the_runbooks_run(follower: Reader) -> None:
    follower.run(_RUNBOOK + "\n".join(f"echo '### {name}'\n{text}" for name, text in read().commands.items()))


@pytest.mark.parametrize("page", BETWEEN)
def test_the_commands_of_a_page_run(page: str, follower: Reader) -> None:
    follower.read(page)


def test_everything_can_be_removed(follower: Reader) -> None:
    follower.read(LAST)
    left = follower.run("kubectl get all,secret,pvc --all-namespaces -o name; kubectl get crd,clusterrole -o name")
    assert [line for line in left.splitlines() if "poc" in line] == []
