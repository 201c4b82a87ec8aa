# SPDX-License-Identifier: Apache-2.0
"""Bringing the cluster up: what runs and is healthy stays, the rest is started."""

import json

from hack.toolchain.__main__ import install
from hack.toolchain.common import require_root, run
from hack.toolchain.steps import step
from hack.toolchain.tools import tool_path

from .cgroups import ensure_group
from .configs import write_configs
from .firewall import ensure_firewall
from .images import ensure_pause_image
from .layout import NODE, admin_kubeconfig, folder, state
from .manifests import manifests
from .network import ensure_network
from .parts import Part, parts
from .pki import ensure_pki
from .ports import require_free_ports
from .processes import ensure_running, running, stop
from .teardown import forget_containers

READY_LIMIT = 120


def up() -> None:
    """Ends when pods can be made."""
    require_root("The cluster")
    install()
    is_new = not state().exists()
    state().mkdir(parents=True, exist_ok=True)
    require_free_ports([part for part in parts() if not running(part.name)])
    ensure_network()
    ensure_firewall()
    ensure_group()
    ensure_pki()
    write_configs()
    for part in parts():
        ensure_running(part)
        if part.name == "containerd" and is_new:
            _begin_without_containers(part)
        _after(part.name)
    _wait_ready()


def kubectl(*arguments: str, limit: float = 60.0, stdin: str | None = None) -> str:
    """Run kubectl as the cluster's administrator."""
    login = ("--kubeconfig", admin_kubeconfig(), "--cache-dir", folder("kubectl-cache"))
    return run([tool_path("kubectl"), *login, *arguments], limit=limit, stdin=stdin)


def _begin_without_containers(containerd: Part) -> None:
    """Let a new cluster find the images of the one before, and none of its containers."""
    if forget_containers():
        stop(containerd.name)
        ensure_running(containerd)


def _after(part: str) -> None:
    """What the parts that come later need from this one."""
    if part == "containerd":
        ensure_pause_image()
    if part == "kube-apiserver":
        kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(manifests()))


def _wait_ready() -> None:
    """Ready is a node that takes pods and the account that pods run as."""
    node = f"node/{NODE}"
    with step("node and service account ready"):
        for event, what in (("create", "serviceaccount/default"), ("create", node), ("condition=Ready", node)):
            kubectl("wait", f"--for={event}", what, f"--timeout={READY_LIMIT}s", limit=READY_LIMIT + 10)
