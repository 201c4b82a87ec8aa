# SPDX-License-Identifier: Apache-2.0
"""The packet filter rules: the one that keeps pods' packets on the machine, and what to remove at the end."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from hack.toolchain.common import cache, run

from .layout import BRIDGE, OWN_NAME

LIMIT = 60.0
# In mangle, because that table is asked before the ones in which kube-proxy lets packets through.
KEEP_IN = ("FORWARD", "-i", BRIDGE, "!", "-o", BRIDGE, "-m", "comment", "--comment", OWN_NAME, "-j", "DROP")
# kube-proxy makes this chain and forgets it in its own cleanup.
FORGOTTEN_CHAIN = "KUBE-FIREWALL"


def ensure_firewall() -> None:
    """Drop what a pod sends to anywhere but another pod or this machine."""
    if not _keeps_in():
        _iptables("mangle", "--append", *KEEP_IN)


def remove_firewall() -> None:
    """Remove our rule, kube-proxy's chains and what the portmap plugin made for our pods."""
    for kube_proxy in kube_proxies()[-1:]:
        run([kube_proxy, "--cleanup"], limit=LIMIT)
    for program in ("iptables", "ip6tables"):
        _remove_forgotten_chain(program)
    _remove_port_mappings()
    if _keeps_in():
        _iptables("mangle", "--delete", *KEEP_IN)


def kube_proxies() -> list[Path]:
    """Return all builds of kube-proxy, the newest last: a cluster can be removed although its tools are older."""
    return sorted((cache() / "tools").glob("kubernetes-*/kube-proxy"), key=lambda path: path.stat().st_mtime_ns)


def _keeps_in() -> bool:
    return OWN_NAME in _iptables("mangle", "--list-rules", "FORWARD")


def _remove_forgotten_chain(program: str) -> None:
    """Only while it is empty: with rules inside, it is the work of somebody else's kubelet."""
    rules = _iptables("filter", "--list-rules", program=program)
    if f"-N {FORGOTTEN_CHAIN}" not in rules or f"-A {FORGOTTEN_CHAIN}" in rules:
        return
    for rule in re.findall(rf"^-A (.* -j {FORGOTTEN_CHAIN})$", rules, re.MULTILINE):
        _iptables("filter", "--delete", *shlex.split(rule), program=program)
    _iptables("filter", "--delete-chain", FORGOTTEN_CHAIN, program=program)


def _remove_port_mappings() -> None:
    """The plugin names the network in its rules; its shared chains go once no other network uses them."""
    ours = rf'-A (CNI-HOSTPORT-DNAT .*name: \\"{OWN_NAME}\\".* -j (CNI-DN-\S+))'
    for rule, chain in re.findall(ours, _iptables("nat", "--list-rules")):
        _iptables("nat", "--delete", *shlex.split(rule))
        _remove_chains([chain])
    rules = _iptables("nat", "--list-rules")
    if "-j CNI-DN-" in rules:
        return
    for rule in re.findall(r"-A ((?:PREROUTING|OUTPUT|POSTROUTING) .*-j CNI-HOSTPORT-\S+)", rules):
        _iptables("nat", "--delete", *shlex.split(rule))
    _remove_chains(re.findall(r"-N (CNI-HOSTPORT-\S+)", rules))


def _remove_chains(chains: Iterable[str]) -> None:
    for chain in chains:
        _iptables("nat", "--flush", chain)
        _iptables("nat", "--delete-chain", chain)


def _iptables(table: str, *arguments: str, program: str = "iptables") -> str:
    return run([program, "--wait", "--table", table, *arguments], limit=LIMIT)
