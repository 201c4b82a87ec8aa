# SPDX-License-Identifier: Apache-2.0
"""Removing the cluster: only what it made, and also what a kill -9 of its processes left."""

import os
import shutil
import signal
from pathlib import Path

from hack.toolchain.common import require_root, run
from hack.toolchain.steps import step

from .cgroups import remove_group
from .firewall import remove_firewall
from .images import ctr
from .layout import OWN_NAME, containerd_root, containerd_socket, state
from .network import remove_network
from .processes import recorded, stop

LIMIT = 60.0
KUBELET_LINKS = Path("/var/log/containers")
NETWORK_RESULTS = Path("/var/lib/cni/results")
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
#: Where containerd keeps files of each container, below its root.
_CONTAINER_FILES = "io.containerd.grpc.v1.cri"
SHIM_SOCKETS = Path("/run/containerd/s")


def down() -> None:
    """Remove everything but the cache."""
    require_root("Removing the cluster")
    with step("processes"):
        _stop_parts()
    with step("containers"):
        _kill_shims()
        remove_group()
    with step("network"):
        remove_firewall()
        remove_network()
    with step("files"):
        _unmount()
        _remove_files()


def forget_containers() -> bool:
    """Remove the containers of a cluster that is gone from containerd, which keeps them with its images.

    Whether there were any: then containerd must be started anew, since it has read them at its start.
    """
    containers = ctr("containers", "list", "--quiet").split()
    if containers:
        ctr("containers", "delete", *containers)
    shutil.rmtree(containerd_root() / _CONTAINER_FILES, ignore_errors=True)
    return bool(containers)


def _stop_parts() -> None:
    """The last one first: the kubelet must not restart what is removed after it."""
    for name in reversed(recorded()):
        stop(name)


def _kill_shims() -> None:
    """A shim belongs to the containerd whose socket is in its command line; no other has ours."""
    socket = str(containerd_socket())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue  # it ended between the listing and the reading
        if words[0].endswith("containerd-shim-runc-v2") and socket in words:
            os.kill(int(folder.name), signal.SIGKILL)


def _unmount() -> None:
    """Everything mounted below our folder, the newest mount first."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for target in reversed(mounts):
        if Path(target).is_relative_to(state()):
            run(["umount", "--lazy", target], limit=LIMIT)


def _remove_files() -> None:
    """Our folder goes last: as long as it is there, an interrupted "down" can be repeated."""
    _remove_outside()
    if state().exists():
        shutil.rmtree(state())


def _remove_outside() -> None:
    """What programs write to fixed places, whatever their settings say: known by our folder or our names."""
    _remove_dead_sockets()
    for link in KUBELET_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(state()):
            link.unlink()
    for result in NETWORK_RESULTS.glob(f"{OWN_NAME}-*-eth0"):
        sandbox = result.name.removeprefix(f"{OWN_NAME}-").removesuffix("-eth0")
        (NETWORK_RESULTS / f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
        result.unlink()
    for name in ("kubelet.sock", "kubelet_internal_checkpoint"):
        (DEVICE_PLUGINS / name).unlink(missing_ok=True)


def _remove_dead_sockets() -> None:
    """Sockets of killed shims. Their names are hashes; one that no process has open is of use to nobody."""
    used = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    for socket in SHIM_SOCKETS.glob("*"):
        if str(socket) not in used:
            socket.unlink(missing_ok=True)
