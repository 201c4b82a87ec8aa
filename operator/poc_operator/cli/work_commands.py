# SPDX-License-Identifier: Apache-2.0
"""``validate`` and ``calibrate``: create the object, wait for its end, and tell what came out."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.meta import API_VERSION
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import State
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.cli import output
from poc_operator.cli.cluster import FAILED, Cluster, UserError, connect
from poc_operator.cli.options import Context, Kubeconfig, Namespace, Output, complete_round
from poc_operator.cli.output import Format
from poc_operator.cli.round_commands import changed, create_object, read_manifest, tell_created

NamedNonces = PoCValidation | PoCCalibration
LOOK_SECONDS = 1.0
#: What a validation and a calibration take over from a round.
_COMMON = ("blockHash", "blockHeight", "publicKey", "model", "fleetRef", "selector", "port", "batchSize")

File = Annotated[Path | None, typer.Option("--filename", "-f", help="Manifest, or - for standard input.")]
OfRound = Annotated[
    str | None,
    typer.Option("--round", help="Round to take block, key, model and pods from.", autocompletion=complete_round),
]
Name = Annotated[str | None, typer.Option(help="Name of the object; without it one is made.")]
Wait = Annotated[bool, typer.Option(help="Wait for its end and tell what came out.")]


def validate(
    *,
    file: File = None,
    round_: OfRound = None,
    nonces: Annotated[int, typer.Option(min=1, max=10_000, help="With --round: results to recompute.")] = 200,
    name: Name = None,
    wait: Wait = True,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Recompute claimed nonces, or results of a round that the gateway has; exit code 1 if it failed or is fraud."""
    cluster = connect(context, namespace, kubeconfig)
    _check_source(file, round_)
    if round_ is not None:
        spec = of_round(_spec(cluster, round_), ("rTarget", "artifact", "decode"))
        proofs = {"round": {"name": round_, "nonces": nonces}}
        manifest = _manifest(PoCValidation, f"{round_}-", {**spec, "proofs": proofs})
    else:
        manifest = read_manifest(file or Path("-"), PoCValidation)
    found = _created(cluster, PoCValidation, changed(manifest, name, {}), wait=wait, format_=format_)
    if found is not None and (found.status.state is State.FAILED or _is_fraud(found)):
        raise typer.Exit(FAILED)


def calibrate(
    *,
    file: File = None,
    round_: OfRound = None,
    valid_rate: Annotated[str, typer.Option(help="With --round: wanted share of valid nonces.")] = "0.1",
    nonces: Annotated[int, typer.Option(min=200, max=20_000, help="With --round: nonces to measure.")] = 2000,
    name: Name = None,
    wait: Wait = True,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Find the rTarget for a wanted share of valid nonces; exit code 1 if it failed."""
    cluster = connect(context, namespace, kubeconfig)
    _check_source(file, round_)
    if round_ is not None:
        spec = of_round(_spec(cluster, round_), ())
        manifest = _manifest(PoCCalibration, f"{round_}-", {**spec, "validRate": valid_rate, "nonces": nonces})
    else:
        manifest = read_manifest(file or Path("-"), PoCCalibration)
    found = _created(cluster, PoCCalibration, changed(manifest, name, {}), wait=wait, format_=format_)
    if found is not None and found.status.state is State.FAILED:
        raise typer.Exit(FAILED)


def _check_source(file: Path | None, round_: str | None) -> None:
    if (file is None) == (round_ is None):
        raise UserError("name exactly one of --filename and --round", 2)


def _spec(cluster: Cluster, name: str) -> Mapping[str, Any]:
    return cluster.object(PoCRound, name).spec.model_dump(mode="json", by_alias=True, exclude_unset=True)


def of_round(spec: Mapping[str, Any], more: tuple[str, ...]) -> dict[str, Any]:
    """Return what an object takes over from a round's spec. A calibration knows no ``strongRng``."""
    taken = {field: spec[field] for field in (*_COMMON, *more) if spec.get(field) is not None}
    if not more:
        taken["model"] = {field: value for field, value in taken["model"].items() if field != "strongRng"}
    return taken


def _manifest(kind: type[NamedNonces], prefix: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"generateName": prefix}
    return {"apiVersion": API_VERSION, "kind": kind.KIND.kind, "metadata": metadata, "spec": dict(spec)}


def _created(
    cluster: Cluster,
    kind: type[NamedNonces],
    manifest: dict[str, Any],
    *,
    wait: bool,
    format_: Format,
) -> NamedNonces | None:
    """Create the object; with ``wait``, return it once it is over, and tell what came out."""
    if manifest["metadata"].get("name"):
        manifest["metadata"].pop("generateName", None)
    made = create_object(cluster, kind, manifest, dry_run=False)
    name, namespace = made["metadata"]["name"], made["metadata"]["namespace"]
    if format_ is Format.TABLE or not wait:
        tell_created(kind, made, format_, dry_run=False)
    if not wait:
        return None
    found = _ended(cluster, kind, name, namespace, quiet=format_ is not Format.TABLE)
    if format_ is Format.TABLE:
        sys.stdout.write(f"{outcome(found)}\n")
    else:
        output.show(found.model_dump(mode="json", by_alias=True, exclude_none=True), format_)
    return found


def _ended(cluster: Cluster, kind: type[NamedNonces], name: str, namespace: str, *, quiet: bool) -> NamedNonces:
    told = ""
    while True:
        found = cluster.object(kind, name, namespace)
        if found.status.state.finished:
            return found
        line = f"{found.status.state}: {found.status.checked} of {found.status.nonces} nonces; {found.status.message}"
        if line != told and not quiet:
            sys.stderr.write(f"{line}\n")
            told = line
        time.sleep(LOOK_SECONDS)


def _is_fraud(found: NamedNonces) -> bool:
    return isinstance(found, PoCValidation) and found.status.verdict is not None and found.status.verdict.fraud


def outcome(found: NamedNonces) -> str:
    """Return what came out in a sentence."""
    status = found.status
    if status.state is State.FAILED:
        return f"Failed: {status.outcome.message if status.outcome else status.message}"
    if isinstance(found, PoCValidation) and found.status.verdict is not None:
        verdict = found.status.verdict
        judged = "fraud" if verdict.fraud else "no fraud"
        return f"{judged}: {verdict.mismatches} of {verdict.total} nonces mismatch, p-value {verdict.p_value}"
    if isinstance(found, PoCCalibration) and found.status.target is not None:
        target = found.status.target
        agrees = "agrees" if target.agrees else "does not agree"
        found_target = f"rTarget {target.r_target} ({target.low} to {target.high})"
        return f"{found_target} makes {target.valid_rate} of the nonces valid; theory {agrees}"
    return f"{status.state}: {status.message}"
