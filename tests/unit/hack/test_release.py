# SPDX-License-Identifier: Apache-2.0
"""The parts of a release that need neither a network nor a build."""

import gzip
import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.images.build import DOCKERFILES
from hack.images.site import ROOT, Role, compile_bytecode
from hack.release import environment
from hack.release.build import ROLES, chart_tree, check_versions, crds, image_config
from hack.release.debian import ARCHITECTURES, LOCK, PACKAGES
from hack.release.kubectl_plugin import PLATFORMS, PROGRAM, krew_manifest
from hack.release.oci import Entry, Tree, chart, compress, image, tar, write_archive
from hack.release.python_packages import check_machine, version
from hack.release.statements import SUMS, debian_components, license_of, write_sums
from hack.toolchain.common import UserError

EPOCH = 1_700_000_000
TREE: Tree = {
    "tmp": Entry(kind="folder", mode=0o1777),
    "usr/bin/python3": Entry(kind="link", content=b"python3.11"),
    "usr/bin/python3.11": Entry(content=b"program", mode=0o755),
}


def _archive(path: Path, tree: Tree) -> dict[str, bytes]:
    images = [image([tree], architecture=one, config={"User": "1"}, epoch=EPOCH) for one in ARCHITECTURES]
    write_archive(path, images, tag="1.2.3", epoch=EPOCH)
    with tarfile.open(path) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def _blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    content = files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
    assert len(content) == descriptor["size"]
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
    return content


def test_the_sbom_has_each_debian_package_of_each_architecture() -> None:
    found = debian_components()
    assert len({one["bom-ref"] for one in found}) == len(found)
    for architecture in ARCHITECTURES:
        there = {one["name"]: one for one in found if f"?arch={architecture}&distro=bookworm" in one["purl"]}
        assert set(PACKAGES) <= there.keys()
        assert there["base-files"]["purl"].startswith("pkg:deb/debian/base-files@12.4%2Bdeb12u")
        assert all(len(one["hashes"][0]["content"]) == 64 for one in there.values())


def test_an_archive_depends_on_its_files_alone(tmp_path: Path) -> None:
    turned = dict(reversed(list(TREE.items())))
    first, second = tmp_path / "first", tmp_path / "second"
    assert _archive(first, TREE) == _archive(second, turned)
    assert first.read_bytes() == second.read_bytes()
    changed = {**TREE, "usr/bin/python3.11": Entry(content=b"program", mode=0o644)}
    assert _archive(second, changed) != _archive(first, TREE)


def test_an_archive_has_an_image_for_each_architecture(tmp_path: Path) -> None:
    files = _archive(tmp_path / "archive", TREE)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (named,) = json.loads(files["index.json"])["manifests"]
    assert named["annotations"] == {"org.opencontainers.image.ref.name": "1.2.3"}
    manifests = json.loads(_blob(files, named))["manifests"]
    assert [one["platform"]["architecture"] for one in manifests] == list(ARCHITECTURES)
    for descriptor in manifests:
        manifest = json.loads(_blob(files, descriptor))
        config = json.loads(_blob(files, manifest["config"]))
        assert config["architecture"] == descriptor["platform"]["architecture"]
        layers = [gzip.decompress(_blob(files, layer)) for layer in manifest["layers"]]
        digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        assert config["rootfs"]["diff_ids"] == digests


def test_a_layer_keeps_modes_and_links() -> None:
    with tarfile.open(fileobj=io.BytesIO(tar(TREE, EPOCH))) as layer:
        members = {member.name: member for member in layer}
    assert members["tmp"].isdir()
    assert members["tmp"].mode == 0o1777
    assert members["usr/bin/python3"].linkname == "python3.11"
    assert members["usr/bin/python3.11"].mode == 0o755
    assert {(member.uid, member.gid, member.mtime) for member in members.values()} == {(0, 0, EPOCH)}


@pytest.mark.parametrize("role", ROLES)
def test_an_image_starts_as_its_dockerfile_says(role: Role) -> None:
    text = DOCKERFILES[role].read_text()
    config = image_config(role, "1.2.3")
    assert f"USER {config['User']}\n" in text
    assert f"ENTRYPOINT {json.dumps(config['Entrypoint'])}\n" in text
    said = {word for line in re.findall(r"^ENV (.+)$", text, re.MULTILINE) for word in line.split()}
    assert said <= set(config["Env"])
    assert f"COPY . /opt/vllm-poc-{role}\n" in text


def test_a_chart_names_its_archive(tmp_path: Path) -> None:
    archive = compress(tar(chart_tree(), EPOCH))
    blobs = chart(archive, {"name": "vllm-poc-operator"})
    assert json.loads(blobs[-1].content)["layers"][0]["digest"] == f"sha256:{hashlib.sha256(archive).hexdigest()}"
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        names = opened.getnames()
    assert {"vllm-poc-operator/Chart.yaml", "vllm-poc-operator/templates/NOTES.txt"} <= set(names)


def test_everything_has_the_version_of_pyproject() -> None:
    check_versions(version())
    with pytest.raises(UserError, match=r"version 9\.9\.9: write it to charts.*Chart\.yaml.*poc_gateway.*poc_operator"):
        check_versions("9.9.9")


def test_the_definitions_are_one_file() -> None:
    found = [document["spec"]["names"]["kind"] for document in yaml.safe_load_all(crds())]
    assert sorted(found) == ["PoCCalibration", "PoCFleet", "PoCRound", "PoCValidation"]


def test_every_debian_package_is_pinned_for_every_architecture() -> None:
    pins = json.loads(LOCK.read_text())
    assert list(pins) == list(ARCHITECTURES)
    for packages in pins.values():
        assert [one["name"] for one in packages] == sorted(PACKAGES)
        assert all(re.fullmatch("[0-9a-f]{64}", one["sha256"]) for one in packages)


def test_a_library_of_another_architecture_is_refused() -> None:
    header = b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little")
    tree = {"opt/library.so": Entry(content=header)}
    check_machine(tree, "amd64")
    with pytest.raises(UserError, match=r"/opt/library\.so is not for arm64"):
        check_machine(tree, "arm64")


def test_bytecode_names_the_place_in_the_image(tmp_path: Path) -> None:
    written = []
    for name in ("one", "another"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "module.py").write_text("WORDS = {'a', 'b', 'c'} \ndef f(x): return x in {'d', 'e', 'f'}\n")
        compile_bytecode(folder, "/opt/program")
        (compiled,) = folder.rglob("*.pyc")
        written.append(compiled.read_bytes())
    assert written[0] == written[1]
    assert b"/opt/program/module.py" in written[0]


@pytest.mark.parametrize(
    ("metadata", "classifiers", "found"),
    [
        ({"License-Expression": "MIT", "License": "other"}, ["License :: OSI Approved :: BSD License"], "MIT"),
        ({"License": "other"}, ["License :: OSI Approved :: BSD License"], "BSD License"),
        ({"License": "ISC\nand the whole text"}, ["Typing :: Typed"], "ISC"),
        ({}, [], ""),
    ],
)
def test_a_license_is_what_the_metadata_says(metadata: dict[str, str], classifiers: list[str], found: str) -> None:
    assert license_of(metadata, classifiers) == found


def test_the_sums_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    write_sums(tmp_path)
    write_sums(tmp_path)
    assert (tmp_path / SUMS).read_text() == f"{hashlib.sha256(b'content').hexdigest()}  file\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("ERROR: Could not connect\nTip: your network may be blocking this service.", r"operator\.txt is not audited"),
        ("Found 1 known vulnerability in 1 package", "Found 1 known vulnerability"),
    ],
)
def test_an_audit_tells_a_finding_from_missing_data(output: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise UserError(output)

    monkeypatch.setattr(environment, "run", fail)
    monkeypatch.setattr(environment, "tool", Path)
    with pytest.raises(UserError, match=said):
        environment.audit()


def test_the_workflows_pin_what_they_use_by_commit() -> None:
    """A tag may be moved to other code."""
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yaml")]
    used = [line for text in texts for line in re.findall(r"uses: (.+)$", text, re.MULTILINE)]
    assert len(used) >= 5
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+[.]\d+[.]\d+", line)] == []
    names = [line.split("@")[0] for line in set(used)]
    assert len(names) == len(set(names))  # one commit of each


def test_the_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used: set[str] = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yaml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            used |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
            used |= {
                target
                for step in job["steps"]
                for target in re.findall(r"make ([a-z-]+)(?: [A-Z]+=.*)?$", step.get("run", ""))
            }
    assert {"check", "test-unit", "test-docs", "release-artifacts"} <= used
    assert used - targets == set()


def test_git_trusts_the_checkout_in_every_container() -> None:
    """The checkout belongs to another user than the container's, and git then refuses to say anything of it."""
    trusted, needed = [], []
    for path in (ROOT / ".github" / "workflows").glob("*.yaml"):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            used = [one.get("uses", "").split("@")[0] for one in job["steps"]]
            if "container" in job and "actions/checkout" in used:
                needed.append((path.name, name))
                after = job["steps"][used.index("actions/checkout") + 1]
                if after.get("run") == 'git config --global --add safe.directory "$GITHUB_WORKSPACE"':
                    trusted.append((path.name, name))
    assert len(needed) >= 3
    assert trusted == needed


def test_krew_finds_an_archive_for_each_platform(tmp_path: Path) -> None:
    for number, platform in enumerate(PLATFORMS):
        (tmp_path / platform.archive("1.2.3")).write_bytes(bytes([number]))
    manifest = krew_manifest(tmp_path, "1.2.3", "https://git.example/owner/name/releases/download/v1.2.3")
    assert manifest["spec"]["homepage"] == "https://git.example/owner/name"
    assert manifest["spec"]["version"] == "v1.2.3"
    found = {one["uri"].rsplit("/", 1)[1]: one for one in manifest["spec"]["platforms"]}
    assert len(found) == len(PLATFORMS)
    for name, one in found.items():
        assert one["uri"] == f"https://git.example/owner/name/releases/download/v1.2.3/{name}"
        assert one["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        assert one["bin"] == PROGRAM
        assert name.endswith("-{os}-{arch}.tar.gz".format(**one["selector"]["matchLabels"]))
