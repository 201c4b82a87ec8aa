# SPDX-License-Identifier: Apache-2.0
"""The configuration files of the cluster's programs. JSON is YAML too, so json.dumps writes what they read."""

import base64
import json
from pathlib import Path

from .layout import (
    API_URL,
    BRIDGE,
    CLUSTER_DOMAIN,
    DNS_SERVICE_ADDRESS,
    HOST_ADDRESS,
    NODE,
    OWN_NAME,
    PAUSE_IMAGE,
    POD_RANGE,
    Port,
    admin_kubeconfig,
    certificate,
    config,
    containerd_root,
    containerd_socket,
    folder,
    key,
    kubeconfig,
)

Settings = dict[str, object]
KUBECONFIG_USERS = ("controller-manager", "scheduler", "kubelet", "kube-proxy", "coredns")
CNI_PLUGINS = "/usr/lib/cni"


def write_configs() -> None:
    """Write what is new or changed; the parts that read a changed file are restarted."""
    folder("kubeconfigs")
    folder("config")
    for user in KUBECONFIG_USERS:
        _write(kubeconfig(user), json.dumps(_kubeconfig(user)))
    _write(admin_kubeconfig(), json.dumps(_kubeconfig("admin")))
    # Pods that take the machine's resolver get the cluster's, so that no name is looked up outside of the machine.
    _write(config("resolv.conf"), f"nameserver {DNS_SERVICE_ADDRESS}\n")
    _write(config("containerd.toml"), _containerd())
    _write(config("Corefile"), _corefile())
    _write(folder("cni") / "10-pods.conflist", json.dumps(_cni()))
    _write(config("kubelet.yaml"), json.dumps(_kubelet()))
    _write(config("kube-proxy.yaml"), json.dumps(_kube_proxy()))


def _write(path: Path, content: str) -> None:
    """Leave a file that is right untouched: kube-proxy ends when its own is written, changed or not."""
    if not path.exists() or path.read_text() != content:
        path.touch(mode=0o600)
        path.write_text(content)


def _kubeconfig(user: str) -> Settings:
    """The certificates are inside, so that a copy of the file works too."""
    cluster = {"server": API_URL, "certificate-authority-data": _base64(certificate("ca"))}
    login = {"client-certificate-data": _base64(certificate(user)), "client-key-data": _base64(key(user))}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": OWN_NAME, "cluster": cluster}],
        "users": [{"name": user, "user": login}],
        "contexts": [{"name": OWN_NAME, "context": {"cluster": OWN_NAME, "user": user}}],
        "current-context": OWN_NAME,
    }


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _containerd() -> str:
    # restrict_oom_score_adj: a machine without CAP_SYS_RESOURCE cannot lower oom_score_adj, and runc would fail.
    return f"""version = 2
root = "{containerd_root()}"
state = "{folder("containerd-state")}"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{containerd_socket()}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{folder("cni")}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{folder("runc")}"
"""


def _cni() -> Settings:
    """No masquerading: a packet of a pod has no business outside of the machine."""
    addresses: Settings = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_RANGE, "gateway": HOST_ADDRESS}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder("cni-addresses")),
    }
    bridge: Settings = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": addresses,
    }
    portmap: Settings = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
    return {"cniVersion": "0.4.0", "name": OWN_NAME, "plugins": [bridge, portmap]}


def _corefile() -> str:
    """No forwarding: what the cluster does not know does not exist."""
    return f"""{CLUSTER_DOMAIN}:{Port.DNS} in-addr.arpa:{Port.DNS} ip6.arpa:{Port.DNS} {{
  bind {HOST_ADDRESS}
  errors
  ready 127.0.0.1:{Port.DNS_READY}
  kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig("coredns")}
    ttl 5
  }}
}}
.:{Port.DNS} {{
  bind {HOST_ADDRESS}
  errors
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""


def _kubelet() -> Settings:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": HOST_ADDRESS,
        "port": Port.KUBELET,
        "healthzPort": Port.KUBELET_HEALTH,
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(certificate("ca"))}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate("kubelet")),
        "tlsPrivateKeyFile": str(key("kubelet")),
        "containerRuntimeEndpoint": f"unix://{containerd_socket()}",
        "clusterDomain": CLUSTER_DOMAIN,
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "resolvConf": str(config("resolv.conf")),
        "podLogsDir": str(folder("pod-logs")),
        "volumePluginDir": str(folder("volume-plugins")),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{OWN_NAME}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # The chains that pods need are kube-proxy's; without the kubelet's own there is less to clean up.
        "makeIPTablesUtilChains": False,
        # An image cannot be pulled again, so none is ever collected.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "syncFrequency": "10s",
    }


def _kube_proxy() -> Settings:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "hostnameOverride": NODE,
        "bindAddress": HOST_ADDRESS,
        "healthzBindAddress": f"127.0.0.1:{Port.PROXY_HEALTH}",
        "metricsBindAddress": f"127.0.0.1:{Port.PROXY_METRICS}",
        "clientConnection": {"kubeconfig": str(kubeconfig("kube-proxy"))},
        "mode": "iptables",
        "iptables": {"localhostNodePorts": False},
        "clusterCIDR": POD_RANGE,
        # Node ports answer on the bridge alone: nothing of the cluster is open to the network of the machine.
        "nodePortAddresses": [POD_RANGE],
        # Zero leaves the machine's connection tracking as it is; its settings may be read-only.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "oomScoreAdj": 0,
    }
