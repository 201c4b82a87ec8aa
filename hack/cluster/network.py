# SPDX-License-Identifier: Apache-2.0
"""The machine's side of the pod network: the bridge, its routes and two kernel settings."""

import ipaddress
import json
from pathlib import Path

from hack.toolchain.common import UserError, run

from .layout import BRIDGE, BRIDGE_MAC, HOST_ADDRESS, POD_RANGE, SERVICE_RANGE, state

LIMIT = 30.0
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
BRIDGE_FILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
# Worse than every other route: it counts only when the bridge is gone, and then stray packets end here.
LAST_METRIC = "4096"


def ensure_network() -> None:
    """Make the bridge and the routes; whatever is there already stays."""
    _require_own_ranges()
    _ensure_sysctls()
    if not _bridge_exists():
        run(["ip", "link", "add", BRIDGE, "address", BRIDGE_MAC, "type", "bridge"], limit=LIMIT)
    run(["ip", "address", "replace", f"{HOST_ADDRESS}/24", "dev", BRIDGE], limit=LIMIT)
    run(["ip", "link", "set", BRIDGE, "up"], limit=LIMIT)
    # The Service addresses lead to the bridge: without kube-proxy's rules their packets end there.
    run(["ip", "route", "replace", SERVICE_RANGE, "dev", BRIDGE, "src", HOST_ADDRESS], limit=LIMIT)
    for addresses in (POD_RANGE, SERVICE_RANGE):
        run(["ip", "route", "replace", "blackhole", addresses, "metric", LAST_METRIC], limit=LIMIT)


def remove_network() -> None:
    """Undo ensure_network; what is not there is no error."""
    if _bridge_exists():
        run(["ip", "link", "delete", BRIDGE], limit=LIMIT)
    for route in json.loads(run(["ip", "--json", "route", "show", "type", "blackhole"], limit=LIMIT)):
        if route["dst"] in (POD_RANGE, SERVICE_RANGE) and str(route.get("metric")) == LAST_METRIC:
            run(["ip", "route", "delete", "blackhole", route["dst"], "metric", LAST_METRIC], limit=LIMIT)
    before = _forwarding_before()
    if before.exists():
        FORWARDING.write_text(before.read_text())


def _require_own_ranges() -> None:
    """The two ranges, or a part of them, must not lead to somebody else's network."""
    ours = [ipaddress.IPv4Network(addresses) for addresses in (POD_RANGE, SERVICE_RANGE)]
    for route in json.loads(run(["ip", "--json", "-4", "route", "show"], limit=LIMIT)):
        device = route.get("dev", BRIDGE)  # our blackhole routes have no device
        if route["dst"] == "default" or device == BRIDGE:
            continue
        foreign = ipaddress.IPv4Network(route["dst"])
        if any(foreign.subnet_of(network) for network in ours):
            raise UserError(f"The addresses {foreign} lead to {device} already: remove that network first.")


def _ensure_sysctls() -> None:
    """Pods' packets are routed between pods and the machine, and also seen by iptables on the bridge."""
    if not BRIDGE_FILTER.exists():
        run(["modprobe", "--all", "br_netfilter", "overlay"], limit=LIMIT)
    for setting in (FORWARDING, BRIDGE_FILTER):
        if setting.read_text().strip() != "1":
            if setting == FORWARDING:
                _forwarding_before().write_text(setting.read_text())
            setting.write_text("1")


def _forwarding_before() -> Path:
    """What "down" writes back."""
    return state() / "ip_forward.before"


def _bridge_exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()
