# SPDX-License-Identifier: Apache-2.0
"""Finding out, before anything is started, who else uses a port that a part needs."""

import re
from collections.abc import Iterable

from hack.toolchain.common import UserError, run

from .layout import HOST_ADDRESS
from .parts import Part

LIMIT = 30.0
# A listener at one of these gets in the way: everywhere, or at one of the two addresses that parts listen at.
COLLIDING = ("*", "0.0.0.0", "[::]", "127.0.0.1", HOST_ADDRESS)  # noqa: S104 - compared, not listened at
LISTENERS = ("ss", "--no-header", "--listening", "--numeric", "--tcp", "--udp", "--processes")


def require_free_ports(starting: Iterable[Part]) -> None:
    """Name the first port that is taken, and by whom."""
    wanted = {str(int(port)): part.name for part in starting for port in part.ports}
    for line in run(LISTENERS, limit=LIMIT).splitlines():
        address, _, port = line.split()[4].rpartition(":")
        if port in wanted and address.split("%")[0] in COLLIDING:
            raise UserError(f"Port {port} of {wanted[port]} is in use by {_owner(line)}: stop that first.")


def _owner(line: str) -> str:
    found = re.search(r'\("(?P<name>[^"]+)",pid=(?P<pid>\d+)', line)
    return f"{found['name']} (process {found['pid']})" if found else "an unknown process"
