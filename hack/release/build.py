# SPDX-License-Identifier: Apache-2.0
"""Everything of a release into one folder: packages, images, chart, CRDs, and what is said about them."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from hack.images.site import ROOT, Role
from hack.release import statements
from hack.release.debian import ARCHITECTURES, base_tree
from hack.release.kubectl_plugin import write_krew_manifest, write_plugin
from hack.release.oci import Entry, Tree, chart, compress, image, tar, write_archive
from hack.release.python_packages import application_tree, build_packages, version
from hack.toolchain.common import UserError
from hack.toolchain.steps import step

CHART = ROOT / "charts" / "vllm-poc-operator"
#: The worker's image has a stock vLLM image below it, which its user chooses.
ROLES = (Role.OPERATOR, Role.GATEWAY)


def build(out: Path, epoch: int, downloads: str | None) -> None:
    """Write the release into ``out``, a folder that is emptied first; its files have the time ``epoch`` (seconds).

    Krew's manifest needs the URL below which the files will be: without ``downloads`` there is none.
    """
    release = version()
    check_versions(release)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with step("wheel and source archive"):
        build_packages(out, epoch)
    with step("kubectl poc"):
        write_plugin(out, release, epoch)
    if downloads is not None:
        write_krew_manifest(out, release, downloads)
    images = {}
    for role in ROLES:
        with step(f"{role} image"):
            images[f"vllm-poc-{role}"] = _write_image(role, out, release, epoch)
        statements.write_sbom(role, out / f"vllm-poc-{role}-{release}.cdx.json", epoch)
    images["charts/vllm-poc-operator"] = _write_chart(out, release, epoch)
    (out / f"crds-{release}.yaml").write_text(crds())
    statements.write_licenses(ROLES, out / statements.LICENSES)
    statements.write_provenance(out, version=release, images=images, epoch=epoch)
    statements.write_sums(out)


def check_versions(release: str) -> None:
    """Raise UserError if the chart or the code has another version than ``release``, that of pyproject.toml."""
    metadata = _chart_metadata()
    found = {
        "charts/vllm-poc-operator/Chart.yaml: version": metadata["version"],
        "charts/vllm-poc-operator/Chart.yaml: appVersion": metadata["appVersion"],
    }
    for path, name in (("poc_operator/cli/__init__.py", "VERSION"), ("poc_gateway/__init__.py", "__version__")):
        text = (ROOT / "operator" / path).read_text()
        found[f"operator/{path}"] = release if f'\n{name} = "{release}"\n' in text else "another"
    wrong = sorted(place for place, value in found.items() if value != release)
    if wrong:
        raise UserError(f"pyproject.toml has version {release}: write it to {'; '.join(wrong)} too.")


def crds() -> str:
    """Return all custom resource definitions as one YAML file."""
    texts = [path.read_text().removeprefix("---\n") for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return "".join(f"---\n{text.rstrip()}\n" for text in texts)


def chart_tree() -> Tree:
    """Return the files of the chart, as Helm packs them."""
    files = [path for path in sorted(CHART.rglob("*")) if path.is_file()]
    return {f"{CHART.name}/{path.relative_to(CHART)}": Entry(content=path.read_bytes()) for path in files}


def _write_image(role: Role, out: Path, release: str, epoch: int) -> str:
    (wheel,) = out.glob("*.whl")
    artifacts = [
        image(
            [base_tree(architecture), application_tree(role, architecture, wheel)],
            architecture=architecture,
            config=image_config(role, release),
            epoch=epoch,
        )
        for architecture in ARCHITECTURES
    ]
    return write_archive(out / f"vllm-poc-{role}-{release}.oci.tar", artifacts, tag=release, epoch=epoch)


def image_config(role: Role, release: str) -> dict[str, Any]:
    """What image/ROLE.Dockerfile says; a test compares the two."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": f"/opt/vllm-poc-{role}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        **({"USER": "vllm-poc-operator"} if role is Role.OPERATOR else {}),
    }
    return {
        "User": "65532:65532",
        "Entrypoint": ["python3", "-m", f"poc_{role}"],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "Labels": {
            "org.opencontainers.image.title": f"vllm-poc-{role}",
            "org.opencontainers.image.version": release,
            "org.opencontainers.image.revision": statements.commit(),
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    }


def _write_chart(out: Path, release: str, epoch: int) -> str:
    archive = compress(tar(chart_tree(), epoch))
    (out / f"{CHART.name}-{release}.tgz").write_bytes(archive)
    blobs = chart(archive, _chart_metadata())
    return write_archive(out / f"{CHART.name}-chart-{release}.oci.tar", [blobs], tag=release, epoch=epoch)


def _chart_metadata() -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return metadata
