# SPDX-License-Identifier: Apache-2.0
"""The objects that the cluster itself needs: the DNS Service, and rights of CoreDNS and the API server."""

from .layout import DNS_SERVICE_ADDRESS, HOST_ADDRESS, OWN_NAME, Port

Manifest = dict[str, object]
RBAC = "rbac.authorization.k8s.io"


def manifests() -> Manifest:
    """All of them, as one list to apply."""
    objects = [*_dns_service(), *_dns_rights(), _kubelet_rights()]
    return {"apiVersion": "v1", "kind": "List", "items": objects}


def _dns_service() -> list[Manifest]:
    """A Service without a selector, whose one endpoint is the CoreDNS process on the machine."""
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    protocols = {"dns": "UDP", "dns-tcp": "TCP"}
    service, endpoint = (
        [{"name": name, "protocol": protocol, "port": port} for name, protocol in protocols.items()]
        for port in (53, Port.DNS)
    )
    labels = {"kubernetes.io/service-name": "kube-dns", "endpointslice.kubernetes.io/managed-by": OWN_NAME}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": DNS_SERVICE_ADDRESS, "ports": service},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": labels},
            "addressType": "IPv4",
            "ports": endpoint,
            "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
        },
    ]


def _dns_rights() -> list[Manifest]:
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    name = "system:coredns"
    role: Manifest = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": rules,
    }
    return [role, _binding(name, name, name)]


def _kubelet_rights() -> Manifest:
    """The API server calls the kubelet for logs and exec."""
    return _binding("kube-apiserver-kubelet-client", "system:kubelet-api-admin", "kube-apiserver-kubelet-client")


def _binding(name: str, role: str, user: str) -> Manifest:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }
