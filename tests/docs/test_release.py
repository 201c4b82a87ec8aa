# SPDX-License-Identifier: Apache-2.0
"""How people get and verify a release, with the names of the workflow and the build; where they report a hole."""

import re
import shlex
import subprocess
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hack.release.build import CHART, ROLES
from hack.release.python_packages import version
from hack.release.statements import PROVENANCE, SUMS, write_sums
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.fleets.render import render
from poc_operator.fleets.resolve import Preset, Resolved, Surroundings, packaged, resolve
from tests.docs.pages import ROOT, Block, blocks

WORKFLOW = ROOT / ".github" / "workflows" / "release.yaml"
HOME = yaml.safe_load((CHART / "Chart.yaml").read_text())["home"]


def _commands(start: str) -> list[list[str]]:
    page = ROOT / "docs" / "develop" / "releasing.md"
    return [shlex.split(c) for block in blocks() if block.page == page for c in block.commands if c.startswith(start)]


def _steps() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text())["jobs"]["publish"]["steps"]
    return steps


def sign_command() -> list[str]:
    """The workflow's command that signs."""
    (command,) = [shlex.split(step["run"]) for step in _steps() if step.get("run", "").startswith("cosign ")]
    return command


def verify_command() -> list[str]:
    """The docs' command that verifies."""
    (command,) = _commands("cosign")
    return command


def test_the_signature_is_that_of_the_workflow() -> None:
    sign = sign_command()
    _, verify, file, *options = verify_command()
    given = dict(pairwise(options))
    assert (sign[1], verify) == ("sign-blob", "verify-blob")
    assert file == sign[-1] == SUMS
    assert given["--bundle"] == sign[sign.index("--bundle") + 1]
    # Without a key the certificate names the workflow at the tag that started it.
    assert "--key" not in sign
    name = WORKFLOW.relative_to(ROOT)
    assert given["--certificate-identity"] == f"{HOME}/{name}@refs/tags/v{version()}"
    assert given["--certificate-oidc-issuer"] == "https://token.actions.githubusercontent.com"


def test_sums_are_checked_of_the_files_that_are_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    (tmp_path / "two").unlink()
    (check,) = _commands("sha256sum")
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "one: OK\n")
    (tmp_path / "one").write_text("another")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_images_and_chart_are_pulled_from_where_they_are_pushed() -> None:
    (push,) = [step["run"] for step in _steps() if "skopeo copy" in step.get("run", "")]
    owner = f"ghcr.io/{HOME.split('/')[-2]}"
    pushed = {
        target.replace("$owner", owner).replace("$version", version()).replace("$role", "operator")
        for target in re.findall(r'"docker://([^"]+)"', push)
    }
    (inspect,) = _commands("skopeo")
    (install,) = _commands("helm")
    (chart,) = [word.removeprefix("oci://") for word in install if word.startswith("oci://")]
    given = dict(pairwise(install))
    assert {inspect[-1].removeprefix("docker://"), f"{chart}:{given['--version']}"} == pushed
    (digest,) = _commands("jq")
    assert digest[-1] == PROVENANCE


def test_a_vulnerability_is_reported_in_private() -> None:
    """The page with the forms for issues leads to the form that SECURITY.md names."""
    assert "**Report a vulnerability**" in (ROOT / "SECURITY.md").read_text()
    (link,) = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text())["contact_links"]
    assert set(link) == {"name", "url", "about"}
    assert link["url"] == f"{HOME}/security/advisories/new"


def _air_gap() -> list[Block]:
    return [block for block in blocks() if block.page.name == "chart.md"]


def _air_gap_file(title: str) -> list[Any]:
    (text,) = [block.text for block in _air_gap() if block.title == title]
    return list(yaml.safe_load_all(text))


def test_what_is_carried_into_a_cluster_is_in_the_release() -> None:
    page = (ROOT / "docs" / "develop" / "releasing.md").read_text()
    table = page.replace("VERSION", version()).replace("SYSTEM-ARCHITECTURE", "linux-amd64")
    section = (ROOT / "docs" / "operate" / "chart.md").read_text().partition("## Without the internet")[2]
    shown = re.findall(r"[\w.$-]+\.(?:oci\.tar|tgz|tar\.gz)\b", section.partition("\n## ")[0])
    named = {one.replace("$role", role) for one in shown for role in ROLES}
    own = f"vllm-poc-worker-{version()}.oci.tar"
    assert own in named
    assert [name for name in sorted(named - {own}) if f"`{name}`" not in table] == []


def test_images_are_pushed_to_where_the_values_pull_them() -> None:
    values = yaml.safe_load((ROOT / "docs" / "examples" / "values" / "air-gap.yaml").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    (push,) = [c for block in _air_gap() for c in block.commands if c.startswith("skopeo copy --all")]
    words, registry = shlex.split(push), values["global"]["imageRegistry"]
    for role, part in (("operator", defaults), ("gateway", defaults["gateway"]), ("worker", defaults["fleets"])):
        target = words[-1].replace("$role", role)
        assert target == f"docker://{registry}/{part['image']['repository']}:{version()}"
    _, pod = _air_gap_file("weights.yaml")
    assert pod["spec"]["containers"][0]["image"] == words[-1].removeprefix("docker://").replace("$role", "worker")
    (fleet,) = _air_gap_file("air-gap-fleet.yaml")
    assert fleet["spec"]["imagePullSecrets"] == pod["spec"]["imagePullSecrets"] == values["imagePullSecrets"]


def test_the_weights_that_are_carried_are_where_the_pods_look() -> None:
    (manifest,) = _air_gap_file("air-gap-fleet.yaml")
    metadata = {"namespace": "poc", "uid": "uid", "generation": 1, "resourceVersion": "1"}
    metadata |= {"creationTimestamp": datetime.now(UTC), **manifest["metadata"]}
    fleet = PoCFleet.parse({**manifest, "metadata": metadata})
    around = Surroundings(presets=packaged(), image="worker", products=["NVIDIA-H200"])
    resolved = resolve(fleet.spec, around)
    assert isinstance(resolved, Resolved), resolved
    (pods,) = [body for body in render(fleet, resolved, around) if body["kind"] == "StatefulSet"]
    spec = pods["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    (download,) = [c for block in _air_gap() for c in block.commands if c.startswith("HF_HOME=")]
    home, _, _, model, _, revision = shlex.split(download)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert {model, f"--revision={revision}"} <= {*container["args"], resolved.model}
    # tar writes the folder of that name below the volume.
    (unpack,) = [c for block in _air_gap() for c in block.commands if c.startswith("tar -c ")]
    assert unpack.split()[2] == home.removeprefix("HF_HOME=$PWD/")
    assert variables["HF_HOME"] == f"{unpack.split()[-1]}/{unpack.split()[2]}"
    claim, pod = _air_gap_file("weights.yaml")
    (volume,) = pod["spec"]["volumes"]
    claims = {one.get("persistentVolumeClaim", {}).get("claimName") for one in spec["volumes"]}
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"] == fleet.spec.cache.existing_claim
    assert claim["metadata"]["name"] in claims
    preset = packaged()["minimax-m2.7"]
    assert isinstance(preset, Preset)
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) >= (preset.weights_gib or 0)
