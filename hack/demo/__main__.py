# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.demo: bring everything up, run the example round, show how it goes."""

import argparse
import json
from pathlib import Path

from hack.demo.guide import introduction, next_steps, plugin_steps
from hack.demo.looks import deployment, fleet, round_progress
from hack.deploy.kube import Kube, current_kube
from hack.deploy.local import FLEET, OPERATOR_CHART, SERVED_NAME
from hack.deploy.releases import (
    FLEET_SECONDS,
    GATEWAY,
    NAMESPACE,
    OPERATOR,
    OPERATOR_SECONDS,
    SYSTEM_NAMESPACE,
    deploy_locally,
    replace_outdated,
    wait_for_kind,
)
from hack.images.site import ROOT
from hack.toolchain.common import UserError, main
from hack.toolchain.steps import follow, step
from hack.toolchain.tools import TOOL_SETS

ROUND = ROOT / "docs" / "examples" / "round.yaml"
ROUND_SECONDS = 900.0


def program() -> None:
    """Run the demo on the local cluster or on the user's."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.demo", description=__doc__)
    parser.add_argument("--cluster", choices=["local", "current"], default="local")
    parser.add_argument("--operator-values", type=Path, help="Helm values (with --cluster current)")
    parser.add_argument("--fleet", type=Path, help="a PoCFleet's manifest (with --cluster current)")
    options = parser.parse_args()
    if options.cluster == "local":
        print(introduction([tools.name for tools in TOOL_SETS if not tools.folder.exists()]), flush=True)
        kube = deploy_locally()
        _follow_operator(kube)
        with step("pods of an earlier spec"):
            replace_outdated(kube)
    else:
        kube = _deploy_to_current(*_given(options.operator_values, options.fleet))
        _follow_operator(kube)
    follow("vLLM pods", lambda: fleet(kube, NAMESPACE, FLEET), FLEET_SECONDS)
    _run_round(kube)


def _given(values: Path | None, manifest: Path | None) -> tuple[Path, Path]:
    """Return both files; UserError if one of them is not there."""
    for option, path, what in (
        ("OPERATOR_VALUES", values, "a file with Helm values"),
        ("FLEET", manifest, "the file of a PoCFleet"),
    ):
        if path is None:
            raise UserError(f"{option} is not set: name {what}, as in docs/start/quick-start.md.")
        if not path.is_file():
            raise UserError(f"{option}: {path} does not exist.")
    assert values is not None  # noqa: S101 - for the type checker
    assert manifest is not None  # noqa: S101 - for the type checker
    return values, manifest


def _deploy_to_current(values: Path, manifest: Path) -> Kube:
    kube = current_kube()
    with step("chart and fleet"):
        # Before the operator's chart, whose Roles may belong there.
        kube.ensure_namespace(NAMESPACE, {})
        kube.helm_install(OPERATOR, OPERATOR_CHART, SYSTEM_NAMESPACE, values)
        wait_for_kind(kube)
        _check_fleet(kube, manifest)
        kube.kubectl("--namespace", NAMESPACE, "apply", "--filename", manifest)
    return kube


def _check_fleet(kube: Kube, manifest: Path) -> None:
    """UserError unless the file is the fleet that the example round asks for."""
    found = json.loads(kube.kubectl("create", "--dry-run=client", "-o", "json", "--filename", manifest))
    told = (found["kind"], found["metadata"]["name"], found.get("spec", {}).get("servedName"))
    if told != ("PoCFleet", FLEET, SERVED_NAME):
        need = f'one PoCFleet with the name "{FLEET}" and servedName "{SERVED_NAME}"'
        raise UserError(f"FLEET: {manifest} must have {need}, which the example round asks for.")


def _follow_operator(kube: Kube) -> None:
    follow("operator", lambda: deployment(kube, SYSTEM_NAMESPACE, OPERATOR), OPERATOR_SECONDS)
    follow("gateway", lambda: deployment(kube, SYSTEM_NAMESPACE, GATEWAY), OPERATOR_SECONDS)


def _run_round(kube: Kube) -> None:
    with step("round of an earlier demo"):  # a round's spec is immutable: what is left makes room
        kube.kubectl("--namespace", NAMESPACE, "delete", "pocround", "demo", "--ignore-not-found", limit=150)
    kube.kubectl("--namespace", NAMESPACE, "apply", "--filename", ROUND)
    follow("round", lambda: round_progress(kube, NAMESPACE, "demo"), ROUND_SECONDS)
    print(f"\n$ kubectl -n {NAMESPACE} get pocrounds")
    print(kube.kubectl("--namespace", NAMESPACE, "get", "pocrounds"))
    _say_what_next(kube)


def _say_what_next(kube: Kube) -> None:
    """Print the lines that a newcomer tries next."""
    print("Try next, in this folder:")
    steps = next_steps(
        kubectl=kube.kubectl_path,
        kubeconfig=kube.kubeconfig,
        system=SYSTEM_NAMESPACE,
        namespace=NAMESPACE,
        gateway=GATEWAY,
        plugin=plugin_steps(),
    )
    print("\n".join(f"  {line}" for line in steps))


if __name__ == "__main__":
    main(program, resumes=True)
