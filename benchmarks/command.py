# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.command COMMAND …: run it; print its time and how much memory the machine used at most.

The whole machine is looked at and not the command's own processes, since the pods and the parts of a
cluster are nobody's children. Run it on a machine that does nothing else.
"""

import subprocess
import sys
import threading
import time

PAUSE_SECONDS = 0.5
GIB = 2**20  # in KiB, the unit of /proc/meminfo


def used_kib() -> int:
    """Return the memory that processes hold, without the page cache, in KiB."""
    with open("/proc/meminfo") as lines:
        values = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return values["MemTotal"] - values["MemAvailable"]


def main() -> None:
    """Run the command line's command."""
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    before = peak = used_kib()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(PAUSE_SECONDS):
            peak = max(peak, used_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    status = subprocess.run(sys.argv[1:], check=False).returncode
    seconds = time.monotonic() - begin
    done.set()
    watcher.join()
    print(f"{seconds:.0f} s; memory before {before / GIB:.1f} GiB, at most {peak / GIB:.1f} GiB; exit status {status}")
    sys.exit(status)


if __name__ == "__main__":
    main()
