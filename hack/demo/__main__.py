# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.demo: bring everything up, run the example round, show how it goes."""

import argparse
import subprocess
from pathlib import Path

from hack.demo.looks import deployment, round_progress
from hack.demo.progress import follow
from hack.deploy.kube import Kube, current_kube
from hack.deploy.local import OPERATOR_CHART, WORKER_CHART
from hack.deploy.releases import (
    GATEWAY,
    NAMESPACE,
    OPERATOR,
    OPERATOR_SECONDS,
    SYSTEM_NAMESPACE,
    WORKER,
    WORKER_SECONDS,
    deploy_locally,
)
from hack.images.site import ROOT
from hack.toolchain.common import UserError, main, step

ROUND = ROOT / "docs" / "examples" / "round.yaml"
ROUND_SECONDS = 900.0


def program() -> None:
    """Run the demo on the local cluster or on the user's."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.demo", description=__doc__)
    parser.add_argument("--cluster", choices=["local", "current"], default="local")
    parser.add_argument("--operator-values", type=Path, help="Helm values (with --cluster current)")
    parser.add_argument("--worker-values", type=Path, help="Helm values (with --cluster current)")
    options = parser.parse_args()
    if options.cluster == "local":
        kube = deploy_locally()
    else:
        kube = _deploy_to_current(options.operator_values, options.worker_values)
    _run_round(kube)


def _deploy_to_current(operator: Path | None, worker: Path | None) -> Kube:
    for option, path in (("OPERATOR_VALUES", operator), ("WORKER_VALUES", worker)):
        if path is None:
            raise UserError(f"{option} is not set: name a file with Helm values, as in docs/start/quick-start.md.")
        if not path.is_file():
            raise UserError(f"{option}: {path} does not exist.")
    kube = current_kube()
    with step("charts"):
        # Before the operator's chart, whose Roles may belong there.
        kube.ensure_namespace(NAMESPACE, {})
        kube.helm_install(OPERATOR, OPERATOR_CHART, SYSTEM_NAMESPACE, *filter(None, [operator]))
        kube.helm_install(WORKER, WORKER_CHART, NAMESPACE, *filter(None, [worker]))
    return kube


def _run_round(kube: Kube) -> None:
    follow("operator", lambda: deployment(kube, SYSTEM_NAMESPACE, OPERATOR), OPERATOR_SECONDS)
    follow("gateway", lambda: deployment(kube, SYSTEM_NAMESPACE, GATEWAY), OPERATOR_SECONDS)
    follow("vLLM pods", lambda: deployment(kube, NAMESPACE, WORKER), WORKER_SECONDS)
    # A round's spec is immutable: what an earlier demo left makes room.
    kube.kubectl("--namespace", NAMESPACE, "delete", "pocround", "demo", "--ignore-not-found", limit=150)
    kube.kubectl("--namespace", NAMESPACE, "apply", "--filename", ROUND)
    follow("round", lambda: round_progress(kube, NAMESPACE, "demo"), ROUND_SECONDS)
    print(f"\n$ kubectl -n {NAMESPACE} get pocrounds")
    print(kube.kubectl("--namespace", NAMESPACE, "get", "pocrounds"))
    _say_what_next(kube)


def _say_what_next(kube: Kube) -> None:
    """Print the three lines that a newcomer tries next."""
    setting = "" if kube.kubeconfig is None else f"export KUBECONFIG={kube.kubeconfig}; "
    print("Try next:")
    print(f"  {setting}alias kubectl={kube.kubectl_path}; kubectl -n {NAMESPACE} describe pocround demo")
    print(f"  kubectl -n {NAMESPACE} delete pocround demo; kubectl -n {NAMESPACE} apply -f docs/examples/round.yaml")
    print(f"  kubectl -n {NAMESPACE} get pocrounds -o wide -w")


if __name__ == "__main__":
    try:
        main(program)
    except (KeyboardInterrupt, subprocess.CalledProcessError):
        raise SystemExit(130) from None
