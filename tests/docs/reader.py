# SPDX-License-Identifier: Apache-2.0
"""A reader with an empty local cluster, who saves the files that a page shows and runs its commands in order.

What the pages leave to the reader is done as the local cluster needs it: images that were built here stand for those of
a registry, and one CPU pod with a tiny model stands for the GPU pods. Everything else is as the page says.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hack.cluster.up import up
from hack.deploy.kube import Kube, local_kube
from hack.deploy.local import fleet_spec, gateway_volume, operator_values
from hack.models.store import models
from hack.toolchain.__main__ import install
from hack.toolchain.common import UserError, exclusive
from hack.vllm.environment import environment
from tests.docs.pages import ROOT, SHELL, blocks

#: The namespaces of the quick start, and those of the demo, which would watch the same rounds.
NAMESPACES = ("poc", "poc-system", "poc-demo")
SYSTEM, WORK = "poc-system", "poc"
SECONDS = 900
_FOLDERS = ("charts", "docs", "hack", "image", "locks", "operator", "pyproject.toml")
_KINDS = "pocrounds,pocvalidations,poccalibrations,pocfleets"


@dataclass(frozen=True)
class Reader:
    """Somebody who follows the pages in ``folder``."""

    kube: Kube
    folder: Path

    def read(self, page: str) -> str:
        """Save the page's files, run its cluster blocks in one shell, and return what they print."""
        script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
        for block in blocks():
            if block.page == ROOT / "docs" / page:
                if block.title:
                    (self.folder / block.title).write_text(yaml.safe_dump_all(self._own(block.title, block.text)))
                elif block.language == SHELL and block.kind == "cluster":
                    script += [f"echo '### {block.where}'", block.text]
        return self.run("\n".join(script))

    def run(self, script: str) -> str:
        """Run a bash script; the failing command's output is in the error."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environ = {**self.kube.environment, "PATH": path}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def _own(self, title: str, text: str) -> list[Any]:
        documents = list(yaml.safe_load_all(text))
        if title == "operator-values.yaml":
            local = operator_values(WORK)
            gateway = {key: local["gateway"][key] for key in ("image", "storage")}
            return [_over(documents[0], {"image": local["image"], "gateway": gateway})]
        if title == "fleet.yaml":
            shown = documents[0]["spec"]
            local = {**fleet_spec(replicas=1), "servedName": shown["servedName"]}
            return [{**documents[0], "spec": _over({**shown, "gpu": {}}, local)}]
        return documents


def _over(page: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's values with the local ones put over them."""
    result = dict(page)
    for key, value in local.items():
        inner = result.get(key)
        result[key] = _over(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return result


def reader(folder: Path) -> Reader:
    """Bring the local cluster up, empty it of what the demo installs, and return a reader of the pages."""
    install()
    environment()
    models()
    with exclusive("cluster"):
        up()
    kube = local_kube()
    for name in _FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl").symlink_to(kube.kubectl_path)
    (folder / "bin" / "helm").symlink_to(kube.helm_path)
    plugin = folder / "bin" / "kubectl-poc"
    packages = [str(ROOT / name) for name in ("operator", "image")]
    program = f"import sys\nsys.path[:0] = {packages}\nfrom poc_operator.cli.program import main\nmain()\n"
    plugin.write_text(f"#!{sys.executable}\n{program}")
    plugin.chmod(0o755)
    found = Reader(kube, folder)
    empty(found)
    kube.apply(gateway_volume())
    return found


def empty(found: Reader) -> None:
    """Remove the operator, all rounds, fleets and the namespaces, also after a run that failed halfway."""
    if "pocrounds" in found.run("kubectl api-resources --api-group=poc.gonka.ai -o name"):
        try:
            found.run("kubectl delete poc --all --all-namespaces --timeout=150s")
        except AssertionError as error:
            # Without an operator nobody takes the finalizers off.
            raise UserError("rounds cannot be deleted: run make demo, which brings an operator.") from error
    for namespace in NAMESPACES:
        found.run(f"helm -n {namespace} uninstall vllm-poc-operator --ignore-not-found")
        found.run(f"kubectl delete namespace {namespace} --ignore-not-found --timeout=150s")
    found.run("kubectl delete persistentvolume poc-gateway --ignore-not-found --timeout=60s")
