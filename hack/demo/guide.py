# SPDX-License-Identifier: Apache-2.0
"""What the demo says before it begins, and where it leads when it has ended."""

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hack.images.site import ROOT
from hack.toolchain.durations import estimate

#: Seconds that a run takes on two idle cores, from nothing and with all tools; docs/benchmarks.md has the measurements.
_COLD_SECONDS, _WARM_SECONDS = 570.0, 70.0
_PORT = 8080
_PLUGIN_PAGE = "docs/operate/kubectl-poc.md"


def introduction(missing: Sequence[str]) -> str:
    """Return what the demo will do on this machine, and how long that takes.

    ``missing`` names the tools that have to be built from source first.
    """
    # Each build was timed beside others, so all of them take less than their sum.
    builds = sum(estimate(name) or 0.0 for name in missing)
    minutes = round(min(_WARM_SECONDS + builds, _COLD_SECONDS) / 60)
    time = f"some {minutes} minutes" if minutes > 1 else "about a minute"
    build = f"build {', '.join(missing)} from source" if missing else "nothing to build: the tools are there"
    return "\n".join(
        (
            f"The demo takes {time} on two cores:",
            f"  1. {build}",
            "  2. start a cluster of one Kubernetes node, which nothing outside of this machine can reach",
            "  3. install the operator and the gateway, and start a fleet of two vLLM pods on the CPU",
            "  4. run a round on them for 30 seconds",
            "make demo-down ends all of it. Everything lies in POC_HOME.",
        )
    )


def plugin_steps() -> list[str]:
    """Return the lines that install the kubectl plugin from this repository, as its page has them; none if it is there.

    They are for a shell in the repository's root, as all that next_steps() returns.
    """
    if shutil.which("kubectl-poc") is not None:
        return []
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / _PLUGIN_PAGE).read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (one for one in blocks if "locks/cli.txt" in one)
    return ["# The kubectl plugin, which is not on your PATH. It needs a package index:", *block.splitlines()]


def next_steps(
    *, kubectl: Path | str, kubeconfig: Path | None, system: str, namespace: str, gateway: str, plugin: Sequence[str]
) -> list[str]:
    """Return the lines for a newcomer after the round: commands for a shell, and comments.

    ``system`` is the namespace of the ``gateway``'s Service and Secret, ``namespace`` that of fleet and round.
    ``plugin`` are plugin_steps().
    """
    setting = [] if kubeconfig is None else [f"export KUBECONFIG={shlex.quote(str(kubeconfig))}"]
    secret = f"kubectl -n {system} get secret {gateway}-tokens -o jsonpath='{{.data.token}}'"
    return [
        "# Look at the round and the fleet:",
        *setting,
        f"alias kubectl={shlex.quote(str(kubectl))}",
        f"kubectl -n {namespace} describe pocround demo",
        f"kubectl -n {namespace} get pocfleets",
        *plugin,
        f"# Another round, and the plugin's live view of it, until Ctrl-C ({_PLUGIN_PAGE} has more):",
        f"kubectl -n {namespace} delete pocround demo; kubectl -n {namespace} apply -f docs/examples/round.yaml",
        f"kubectl poc -n {namespace} status -w",
        # Last, since it goes on until somebody ends it.
        f"# The web page: forward its port, open http://localhost:{_PORT}/web/ and give it the token:",
        f"{secret} | base64 -d | cut -d, -f1",
        f"kubectl -n {system} port-forward service/{gateway} {_PORT}",
    ]
