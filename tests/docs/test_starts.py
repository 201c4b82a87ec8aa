# SPDX-License-Identifier: Apache-2.0
"""The four starts: short, without root, and each figure of the pages about operation is one that was measured."""

import re
from pathlib import Path

import pytest
import yaml

from hack.images.site import Machine
from hack.toolchain.common import UserError
from poc_operator.apis.v1alpha1.fleet import FleetSpec
from poc_operator.apis.v1alpha1.fleet_pod import GPU_RESOURCE, PRODUCT_LABEL
from poc_operator.cli import preflight
from poc_operator.fleets.resolve import Preset, Resolved, Surroundings, packaged, resolve
from tests.docs.pages import ROOT, SHELL, blocks, pages
from tests.docs.schemas import example_files, manifest_errors, values_errors

DOCS = ROOT / "docs"
LAPTOP = DOCS / "examples" / "laptop"
STARTS = ("laptop", "quick-start", "own-vllm", "docker-compose")
MOST_COMMANDS = 10
#: How long a pod of a large model may load at its first start, in seconds.
FIRST_START = 14400
LEAST_FLEETS = 8


def _commands(page: str) -> list[str]:
    return [
        command
        for block in blocks()
        if block.page.name == page and block.language == SHELL
        for command in block.commands
    ]


def test_a_laptop_needs_ten_commands_and_no_root() -> None:
    commands = _commands("laptop.md")
    assert len(commands) <= MOST_COMMANDS
    assert not re.search(r"\bsudo\b|\bnvidia", " ".join(commands))


def test_the_laptop_names_the_one_command_that_another_cluster_has() -> None:
    words = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
    (place,) = [words[i] for i, command in enumerate(_commands("laptop.md")) if re.search(r"\bkind\b", command)]
    assert f"only the {place} differs" in (DOCS / "start" / "laptop.md").read_text()


def test_base_images_of_the_laptop_have_a_registry() -> None:
    """Podman knows no registry for a name without one."""
    found = [name for command in _commands("laptop.md") for name in re.findall(r"BASE_IMAGE=(\S+)", command)]
    assert found
    assert [name for name in found if "." not in name.split("/")[0]] == []


def test_the_laptops_files_are_valid() -> None:
    for path in sorted(LAPTOP.glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        found = manifest_errors(body) if "kind" in body else values_errors("vllm-poc-operator", body)
        assert found == [], path.name
    used = {Path(name).name for command in _commands("laptop.md") for name in re.findall(r"docs/examples/\S+", command)}
    assert used == {path.name for path in LAPTOP.glob("*.yaml")}


@pytest.mark.parametrize("page", STARTS)
def test_each_start_leads_on_and_is_found(page: str) -> None:
    assert f"(start/{page}.md)" in (DOCS / "index.md").read_text()
    assert f"start/{page}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(
    ("name", "machine"),
    [("x86_64", Machine.X86_64), ("AMD64", Machine.X86_64), ("arm64", Machine.AARCH64), ("aarch64", Machine.AARCH64)],
)
def test_images_are_for_the_processor_of_the_machine(
    name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: name)
    assert Machine.of_this() is machine


def test_a_processor_without_images_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UserError, match="riscv64"):
        Machine.of_this()


def test_the_quick_start_names_what_a_check_finds_missing() -> None:
    """A cluster without GPUs to offer, and one whose nodes have no label of the product."""
    page = (DOCS / "start" / "quick-start.md").read_text()
    before, _, _ = page.partition("## 1. ")
    assert "`kubectl poc check`" in before
    node = {"metadata": {"name": "a", "labels": {}}, "status": {"allocatable": {GPU_RESOURCE: "8"}}}
    for name, finding in ((GPU_RESOURCE, preflight.gpus([])), (PRODUCT_LABEL, preflight.gpus([node]))):
        assert name in finding.finding
        assert f"`{name}`" in before
        assert finding.about == "GPUs"
    assert "`GPUs`" in before


def test_any_machine_builds_images_for_any_other() -> None:
    """Nothing of an image runs while it is built, so no emulator is needed."""
    for path in (ROOT / "image").glob("*Dockerfile"):
        assert not re.search(r"^RUN\b", path.read_text(), re.MULTILINE | re.IGNORECASE), path.name


def _fleets() -> list[tuple[str, FleetSpec]]:
    """Every fleet that a page or an example shows, with its place."""
    texts = [(block.where, block.text) for block in blocks() if block.language == "yaml" and block.kind != "none"]
    texts += [(path.name, path.read_text()) for path in (*example_files(), *LAPTOP.glob("*.yaml"))]
    bodies = [(place, body) for place, text in texts for body in yaml.safe_load_all(text) if "kind" in (body or {})]
    return [(place, FleetSpec.model_validate(body["spec"])) for place, body in bodies if body["kind"] == "PoCFleet"]


def _preset(spec: FleetSpec) -> Preset | None:
    found = packaged().get(spec.model.preset or "")
    return found if isinstance(found, Preset) else None


def _startup_seconds(spec: FleetSpec) -> int:
    """How long a pod of the fleet may load, where its Kubernetes nodes have the GPUs that it names."""
    products = [spec.gpu.product or "NVIDIA-H200"]
    found = resolve(spec, Surroundings(presets=packaged(), products=products, image="image"))
    assert isinstance(found, Resolved), found
    return found.startup_seconds


def test_fleets_of_the_networks_models_keep_their_weights_and_have_time_to_load_them() -> None:
    large = [(place, spec, preset) for place, spec in _fleets() if (preset := _preset(spec)) and preset.revision]
    assert len(large) >= LEAST_FLEETS
    for place, spec, preset in large:
        assert spec.cache.existing_claim or (spec.cache.gibibytes or 0) >= (preset.weights_gib or 1), place
        assert spec.hugging_face.offline or _startup_seconds(spec) >= 0.99 * FIRST_START, place


def test_the_time_of_a_download_is_that_of_the_presets_weights() -> None:
    """The pages name a size, and the hours at a rate; both follow from the preset, and the fleet allows for them."""
    told = "(\\d+) GiB, which take (\\d\\.\\d) hours at (\\d+) Mbit/s"
    found = [words for page in pages() for words in re.findall(told, page.read_text())]
    preset = packaged()["minimax-m2.7"]
    assert isinstance(preset, Preset)
    assert found
    for size, hours, rate in found:
        assert int(size) == preset.weights_gib
        assert float(hours) == round(int(size) * 2**30 * 8 / (int(rate) * 1e6) / 3600, 1)
        assert float(hours) * 3600 < FIRST_START
    for page in ("README.md", "docs/start/quick-start.md"):
        assert f" {preset.weights_gib} GiB" in (ROOT / page).read_text()


def test_nobody_stops_waiting_before_the_pods_give_up() -> None:
    (spec,) = [spec for place, spec in _fleets() if "quick-start.md" in place]
    (wait,) = [command for command in _commands("quick-start.md") if "wait pocfleet/" in command]
    assert int(wait.partition("--timeout=")[2].removesuffix("h")) * 3600 >= _startup_seconds(spec)
    for page in ("quick-start.md", "docker-compose.md"):
        assert f"`--timeout={FIRST_START // 3600}h`" in (DOCS / "start" / page).read_text()


def test_every_figure_of_the_sizing_was_measured() -> None:
    measured = (DOCS / "benchmarks.md").read_text()
    rows = re.findall(r"^\| [^|]*(?:rounds?|stored|memory of)[^|]*\| ([^|]+) \| ([^|]+) \|$", _sizing(), re.MULTILINE)
    figures = [cell for row in rows for cell in row if re.match(r"\d", cell)]
    assert len(figures) >= 12
    assert [figure for figure in figures if figure not in measured] == []


def _sizing() -> str:
    return (DOCS / "operate" / "sizing.md").read_text()
