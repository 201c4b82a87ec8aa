# SPDX-License-Identifier: Apache-2.0
"""kwok beside the cluster's parts: it makes simulated nodes and pods Ready, for benchmarks and chaos tests alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.toolchain.common import exclusive
from hack.toolchain.tools import KWOK, ensure_tools, tool_path

from .health import HttpCheck
from .layout import Port, admin_kubeconfig
from .parts import Part
from .processes import ensure_running, stop

#: Pods on simulated nodes have addresses of this range, which the machine itself answers at.
SIMULATED_RANGE = "127.1.0.0/16"
#: A node with this annotation is simulated.
NODE_ANNOTATION = {"kwok.x-k8s.io/node": "fake"}
#: Keeps real pods off a simulated node; simulated pods tolerate it.
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
#: A node without a sign of life for so long is taken for lost; kwok renews in a quarter of it.
_LEASE_SECONDS = 40
_STAGES = Path(__file__).with_name("kwok.yaml")


@contextmanager
def kwok() -> Iterator[None]:
    """Run kwok against the cluster, which must be up; it is built if it never was."""
    ensure_tools([KWOK])
    with exclusive("cluster"):
        ensure_running(_part())
    try:
        yield
    finally:
        stop(_part().name)


def _part() -> Part:
    annotation = ",".join(f"{key}={value}" for key, value in NODE_ANNOTATION.items())
    address = f"127.0.0.1:{Port.KWOK}"
    argv = (
        str(tool_path("kwok")),
        f"--kubeconfig={admin_kubeconfig()}",
        f"--config={_STAGES}",
        f"--cidr={SIMULATED_RANGE}",
        "--node-ip=127.0.0.1",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={annotation}",
        f"--node-lease-duration-seconds={_LEASE_SECONDS}",
        f"--server-address={address}",
    )
    return Part("kwok", argv, HttpCheck(f"http://{address}/healthz"), (Port.KWOK,), (_STAGES, admin_kubeconfig()))
