# SPDX-License-Identifier: Apache-2.0
"""The cluster's parts as a table: the command of each, how its health is asked for, and its ports."""

from dataclasses import dataclass
from pathlib import Path

from hack.toolchain.tools import tool_path

from .health import Check, CommandCheck, HttpCheck
from .layout import (
    API_URL,
    CLUSTER_DOMAIN,
    HOST_ADDRESS,
    NODE,
    SERVICE_RANGE,
    Port,
    certificate,
    config,
    containerd_socket,
    folder,
    key,
    kubeconfig,
    state,
)

SERVICE_ACCOUNT_ISSUER = f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}"


@dataclass(frozen=True)
class Part:
    """One program of the cluster."""

    name: str
    argv: tuple[str, ...]
    check: Check
    ports: tuple[int, ...] = ()
    files: tuple[Path, ...] = ()  # read at start: the part is restarted when one of them changes
    limit: float = 60.0  # seconds from its start to its health


def parts() -> tuple[Part, ...]:
    """All parts, in the order in which they start."""
    return (
        _etcd(),
        _containerd(),
        _api_server(),
        _controller_manager(),
        _scheduler(),
        _coredns(),
        _kubelet(),
        _kube_proxy(),  # after the kubelet, because it waits for the node to be registered
    )


def _flags(**flags: object) -> tuple[str, ...]:
    """advertise_address="x" becomes --advertise-address=x."""
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())


def _etcd() -> Part:
    client, peer = f"https://127.0.0.1:{Port.ETCD}", f"http://127.0.0.1:{Port.ETCD_PEER}"
    health = f"http://127.0.0.1:{Port.ETCD_HEALTH}"
    flags = _flags(
        name=NODE,
        data_dir=folder("etcd"),
        listen_client_urls=client,
        advertise_client_urls=client,
        listen_peer_urls=peer,
        initial_advertise_peer_urls=peer,
        initial_cluster=f"{NODE}={peer}",
        listen_metrics_urls=health,
        client_cert_auth="true",
        trusted_ca_file=certificate("etcd-ca"),
        cert_file=certificate("etcd"),
        key_file=key("etcd"),
        log_level="warn",
    )
    ports = (Port.ETCD, Port.ETCD_PEER, Port.ETCD_HEALTH)
    return Part("etcd", (str(tool_path("etcd")), *flags), HttpCheck(f"{health}/health"), ports)


def _containerd() -> Part:
    settings = config("containerd.toml")
    check = CommandCheck(("ctr", "--address", str(containerd_socket()), "version"))
    return Part("containerd", ("containerd", "--config", str(settings)), check, files=(settings,))


def _api_server() -> Part:
    flags = _flags(
        bind_address=HOST_ADDRESS,
        advertise_address=HOST_ADDRESS,
        secure_port=Port.API_SERVER,
        service_cluster_ip_range=SERVICE_RANGE,
        authorization_mode="Node,RBAC",
        enable_admission_plugins="NodeRestriction",
        client_ca_file=certificate("ca"),
        tls_cert_file=certificate("apiserver"),
        tls_private_key_file=key("apiserver"),
        etcd_servers=f"https://127.0.0.1:{Port.ETCD}",
        etcd_cafile=certificate("etcd-ca"),
        etcd_certfile=certificate("apiserver-etcd"),
        etcd_keyfile=key("apiserver-etcd"),
        kubelet_certificate_authority=certificate("ca"),
        kubelet_client_certificate=certificate("apiserver-kubelet"),
        kubelet_client_key=key("apiserver-kubelet"),
        # The node's name does not resolve on the machine.
        kubelet_preferred_address_types="InternalIP",
        service_account_issuer=SERVICE_ACCOUNT_ISSUER,
        service_account_key_file=state() / "pki" / "service-account.pub",
        service_account_signing_key_file=key("service-account"),
        profiling="false",
    )
    check = HttpCheck(f"{API_URL}/readyz", certificate("ca"))
    return Part("kube-apiserver", (str(tool_path("kube-apiserver")), *flags), check, (Port.API_SERVER,))


def _controller_manager() -> Part:
    flags = _flags(
        use_service_account_credentials="true",
        service_account_private_key_file=key("service-account"),
        root_ca_file=certificate("ca"),
        cluster_signing_cert_file=certificate("ca"),
        cluster_signing_key_file=key("ca"),
        flex_volume_plugin_dir=folder("volume-plugins"),
        # By default it makes some twenty pods a second, and simulated fleets have thousands.
        kube_api_qps="100",
        kube_api_burst="200",
    )
    return _controller("controller-manager", Port.CONTROLLER_MANAGER, flags)


def _scheduler() -> Part:
    return _controller("scheduler", Port.SCHEDULER, ())


def _controller(name: str, port: Port, flags: tuple[str, ...]) -> Part:
    """What the two control loops have in common."""
    common = _flags(
        kubeconfig=kubeconfig(name),
        authentication_kubeconfig=kubeconfig(name),
        authorization_kubeconfig=kubeconfig(name),
        bind_address="127.0.0.1",
        secure_port=port,
        tls_cert_file=certificate(name),
        tls_private_key_file=key(name),
        # There is one of it, and without an election a restarted one works at once.
        leader_elect="false",
        profiling="false",
    )
    check = HttpCheck(f"https://127.0.0.1:{port}/healthz", certificate("ca"))
    argv = (str(tool_path(f"kube-{name}")), *common, *flags)
    return Part(f"kube-{name}", argv, check, (port,), (kubeconfig(name),))


def _coredns() -> Part:
    settings = config("Corefile")
    argv = (str(tool_path("coredns")), "-conf", str(settings))
    check = HttpCheck(f"http://127.0.0.1:{Port.DNS_READY}/ready")
    return Part("coredns", argv, check, (Port.DNS, Port.DNS_READY), (settings, kubeconfig("coredns")))


def _kube_proxy() -> Part:
    settings = config("kube-proxy.yaml")
    argv = (str(tool_path("kube-proxy")), *_flags(config=settings))
    check = HttpCheck(f"http://127.0.0.1:{Port.PROXY_HEALTH}/healthz")
    ports = (Port.PROXY_HEALTH, Port.PROXY_METRICS)
    return Part("kube-proxy", argv, check, ports, (settings, kubeconfig("kube-proxy")))


def _kubelet() -> Part:
    settings, login = config("kubelet.yaml"), kubeconfig("kubelet")
    flags = _flags(
        config=settings, kubeconfig=login, root_dir=folder("kubelet"), hostname_override=NODE, node_ip=HOST_ADDRESS
    )
    check = HttpCheck(f"http://127.0.0.1:{Port.KUBELET_HEALTH}/healthz")
    ports = (Port.KUBELET, Port.KUBELET_HEALTH)
    return Part("kubelet", (str(tool_path("kubelet")), *flags), check, ports, (settings, login))
