# SPDX-License-Identifier: Apache-2.0
"""kubectl and helm with one kubeconfig."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster.layout import admin_kubeconfig
from hack.toolchain.common import UserError, run
from hack.toolchain.tools import tool_path

LIMIT = 60.0


@dataclass(frozen=True, kw_only=True)
class Kube:
    """Where a cluster is and what to talk to it with; ``kubeconfig`` None means the user's own."""

    kubectl_path: Path
    helm_path: Path
    kubeconfig: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of kubectl and helm."""
        own = {} if self.kubeconfig is None else {"KUBECONFIG": str(self.kubeconfig)}
        return {**os.environ, **own}

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, limit: float = LIMIT) -> str:
        """Run kubectl and return its standard output."""
        return run([self.kubectl_path, *arguments], limit=limit, stdin=stdin, env=self.environment)

    def get(self, *arguments: str) -> Any:  # noqa: ANN401 - the API server's JSON
        """Return ``kubectl get … -o json``."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Apply one object."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def ensure_namespace(self, name: str, labels: Mapping[str, str]) -> None:
        """Create a namespace with these labels, or label an existing one."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}})

    def helm_install(self, release: str, chart: Path, namespace: str, *values: Mapping[str, Any] | Path) -> None:
        """Install or upgrade a chart with values from files or mappings, later ones winning."""
        argv: list[str | Path] = [self.helm_path, "upgrade", "--install", release, chart]
        argv += ["--namespace", namespace, "--create-namespace"]
        stdin = None
        for value in values:
            argv += ["--values", value if isinstance(value, Path) else "-"]
            stdin = stdin if isinstance(value, Path) else json.dumps(value)
        run(argv, limit=LIMIT, stdin=stdin, env=self.environment)


def local_kube() -> Kube:
    """Return the tools of the local cluster."""
    return Kube(kubectl_path=tool_path("kubectl"), helm_path=tool_path("helm"), kubeconfig=admin_kubeconfig())


def current_kube() -> Kube:
    """Return the user's own tools, with the cluster that they point at."""
    kube = Kube(kubectl_path=_on_path("kubectl"), helm_path=_on_path("helm"))
    kube.kubectl("version", "--request-timeout=10s", limit=20)
    return kube


def _on_path(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise UserError(f"{name} is not on the PATH: install it to use the cluster of your kubeconfig.")
    return Path(found)
