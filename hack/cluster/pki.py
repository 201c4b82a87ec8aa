# SPDX-License-Identifier: Apache-2.0
"""The cluster's certificates, made with the openssl command: two authorities, and one for each program."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hack.toolchain.common import run

from .layout import API_SERVICE_ADDRESS, CLUSTER_DOMAIN, HOST_ADDRESS, NODE, state

DAYS = 3650
# openssl wants a configuration with these two sections even if every value is given on the command line.
MINIMAL_CONFIG = "[req]\ndistinguished_name = name\n[name]\n"


@dataclass(frozen=True)
class Leaf:
    """A certificate of one program, to serve with and to call with."""

    name: str
    common_name: str
    organization: str = ""
    names: tuple[str, ...] = ("DNS:localhost", "IP:127.0.0.1")
    authority: str = "ca"

    @property
    def subject(self) -> str:
        """Whom the API server takes the caller for: the organization is its group."""
        return (f"/O={self.organization}" if self.organization else "") + f"/CN={self.common_name}"


API_SERVER_NAMES = (
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    f"DNS:kubernetes.default.svc.{CLUSTER_DOMAIN}",
    "DNS:localhost",
    "IP:127.0.0.1",
    f"IP:{HOST_ADDRESS}",
    f"IP:{API_SERVICE_ADDRESS}",
)

# etcd lets in whoever its authority signed; that must be the API server alone, so its authority is another.
AUTHORITIES = ("ca", "etcd-ca")

LEAVES = (
    Leaf("etcd", "etcd", authority="etcd-ca"),
    Leaf("apiserver-etcd", "kube-apiserver", authority="etcd-ca"),
    Leaf("apiserver", "kube-apiserver", names=API_SERVER_NAMES),
    Leaf("apiserver-kubelet", "kube-apiserver-kubelet-client"),
    Leaf("controller-manager", "system:kube-controller-manager"),
    Leaf("scheduler", "system:kube-scheduler"),
    Leaf("kubelet", f"system:node:{NODE}", "system:nodes", (f"DNS:{NODE}", f"IP:{HOST_ADDRESS}")),
    Leaf("kube-proxy", "system:kube-proxy"),
    Leaf("coredns", "system:coredns"),
    Leaf("admin", "admin", "system:masters"),
)


def ensure_pki() -> None:
    """Make all certificates once; the folder appears complete or not at all."""
    target = state() / "pki"
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".pki-"))
    try:
        (scratch / "openssl.cnf").write_text(MINIMAL_CONFIG)
        for name in AUTHORITIES:
            _authority(scratch, name)
        for leaf in LEAVES:
            _leaf(scratch, leaf)
        _service_account_key(scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _authority(folder: Path, name: str) -> None:
    extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
    _certificate(folder, name, f"/CN=vllm-poc-operator {name}", extensions, signer=())


def _leaf(folder: Path, leaf: Leaf) -> None:
    extensions = (
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        "extendedKeyUsage=serverAuth,clientAuth",
        f"subjectAltName={','.join(leaf.names)}",
    )
    signer = ("-CA", folder / f"{leaf.authority}.crt", "-CAkey", folder / f"{leaf.authority}.key")
    _certificate(folder, leaf.name, leaf.subject, extensions, signer)


def _certificate(
    folder: Path, name: str, subject: str, extensions: tuple[str, ...], signer: tuple[str | Path, ...]
) -> None:
    """A new key and its certificate, signed by the signer or, without one, by itself."""
    argv: list[str | Path] = ["openssl", "req", "-x509", "-config", folder / "openssl.cnf"]
    argv += ["-days", str(DAYS)]
    argv += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    argv += ["-subj", subject, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt", *signer]
    for extension in extensions:
        argv += ["-addext", extension]
    run(argv, limit=30)


def _service_account_key(folder: Path) -> None:
    """The key pair that service account tokens are signed and checked with."""
    private, public = folder / "service-account.key", folder / "service-account.pub"
    algorithm = ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048")
    run(["openssl", "genpkey", *algorithm, "-out", private], limit=60)
    run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], limit=30)
