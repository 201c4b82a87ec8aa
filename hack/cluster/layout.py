# SPDX-License-Identifier: Apache-2.0
"""Where everything of the cluster lies: names, addresses, ports and folders."""

from enum import IntEnum
from pathlib import Path

from hack.toolchain.common import cache, home

NODE = "local"
# Interface names have at most 15 characters.
BRIDGE = "poc0"
BRIDGE_MAC = "0a:58:0a:f4:00:01"
# The machine's own address on the pod network: pods reach servers on the machine by it.
HOST_ADDRESS = "10.244.0.1"
POD_RANGE = "10.244.0.0/24"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_SERVICE_ADDRESS = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"
# The name of the pod network and of the cgroup all pods are under; nothing else on the machine is called so.
OWN_NAME = "vllm-poc-local"
CONTAINERD_NAMESPACE = "k8s.io"
PAUSE_IMAGE = "localhost/poc-pause:1"


class Port(IntEnum):
    """None is a default port of its program, so that a cluster of the user's own is not disturbed."""

    API_SERVER = 16443
    ETCD = 12379
    ETCD_PEER = 12380
    ETCD_HEALTH = 12381
    DNS = 20053
    DNS_READY = 20181
    KUBELET = 20250
    KUBELET_HEALTH = 20248
    PROXY_HEALTH = 20256
    PROXY_METRICS = 20249
    CONTROLLER_MANAGER = 20257
    SCHEDULER = 20259
    KWOK = 20247


API_URL = f"https://{HOST_ADDRESS}:{Port.API_SERVER}"


def state() -> Path:
    """The folder of the running cluster; "down" removes it."""
    return home() / "cluster"


def folder(name: str) -> Path:
    """A folder of the cluster's state, made when it is missing."""
    path = state() / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def certificate(name: str) -> Path:
    """A certificate of the table in pki.py."""
    return state() / "pki" / f"{name}.crt"


def key(name: str) -> Path:
    """The private key of a certificate."""
    return state() / "pki" / f"{name}.key"


def kubeconfig(user: str) -> Path:
    """The login of one program at the API server."""
    return state() / "kubeconfigs" / f"{user}.yaml"


def admin_kubeconfig() -> Path:
    """The login of the person at the terminal and of tests."""
    return state() / "kubeconfig"


def config(name: str) -> Path:
    """A configuration file of a program."""
    return state() / "config" / name


def log(part: str) -> Path:
    """What a part prints."""
    return state() / "logs" / f"{part}.log"


def containerd_root() -> Path:
    """containerd's images; they stay when the cluster goes, since bringing them in takes most of a minute."""
    path = cache() / "containerd"
    path.mkdir(parents=True, exist_ok=True)
    return path


def containerd_socket() -> Path:
    """Where the cluster's own containerd listens; its shims are told apart by this path."""
    return state() / "containerd.sock"
