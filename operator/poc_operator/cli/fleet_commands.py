# SPDX-License-Identifier: Apache-2.0
"""``fleet``: which presets there are, and how an update of a fleet's pods gets on."""

import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.cli import output, rollout_history
from poc_operator.cli.cluster import FAILED, Cluster, UserError, collection, connect, core
from poc_operator.cli.looking import deployments
from poc_operator.cli.options import Context, FleetName, Kubeconfig, Namespace, Output
from poc_operator.cli.output import NONE, Column, Format
from poc_operator.fleets.resolve import Invalid, Presets, packaged, with_config_maps

app = typer.Typer(help="List presets; follow, pause and undo updates of pods.", no_args_is_help=True)
rollout = typer.Typer(help="Follow, pause and undo the update of a fleet's pods.", no_args_is_help=True)
app.add_typer(rollout, name="rollout")
rollout.command()(rollout_history.history)
rollout.command()(rollout_history.undo)

#: Label of ConfigMaps with presets.
_PRESETS = "poc.gonka.ai/presets=true"
_COLUMNS = (
    Column("NAME"),
    Column("MODEL"),
    Column("GPUS"),
    Column("NONCES/MIN"),
    Column("SEQLEN", rank=2),
    Column("KDIM", rank=3),
    Column("WEIGHTS", rank=1),
)
LOOK_SECONDS = 2.0


@app.command()
def presets(
    *,
    from_cluster: Annotated[
        bool, typer.Option("--from-cluster", help="Also those of ConfigMaps beside the operator.")
    ] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    format_: Output = Format.TABLE,
) -> None:
    """List the presets of fleets: models with flags and GPUs. Without --from-cluster it asks no cluster."""
    found = packaged()
    if from_cluster:
        found = with_config_maps(_entries(connect(context, None, kubeconfig)))
    if format_ is Format.TABLE:
        output.console().print(
            output.table("", _COLUMNS, [row for name in sorted(found) for row in _rows(name, found)])
        )
    else:
        output.show([_data(name, found) for name in sorted(found)], format_)


def _entries(cluster: Cluster) -> list[tuple[str, str, str]]:
    namespaces = sorted({body["metadata"]["namespace"] for body in deployments(cluster)})
    bodies = [body for one in namespaces for body in cluster.items(core("configmaps", one), _PRESETS)]
    return [(body["metadata"]["name"], key, text) for body in bodies for key, text in (body.get("data") or {}).items()]


def _rows(name: str, found: Presets) -> Iterable[tuple[str, ...]]:
    preset = found[name]
    if isinstance(preset, Invalid):
        yield name, f"unusable: {preset.why}", "", "", "", "", ""
        return
    weights = f"{preset.weights_gib} GiB" if preset.weights_gib else NONE
    shared = (str(preset.seq_len), str(preset.k_dim), weights)
    for place, gpu in enumerate(preset.gpus):
        first = (name, preset.model, *shared) if not place else ("",) * 5
        yield first[0], first[1], str(gpu), str(gpu.nonces_per_minute or NONE), *first[2:]


def _data(name: str, found: Presets) -> dict[str, Any]:
    preset = found[name]
    if isinstance(preset, Invalid):
        return {"name": name, "unusable": preset.why}
    return preset.model_dump(mode="json", by_alias=True, exclude_none=True)


@rollout.command()
def status(
    name: FleetName,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Wait until it is complete or has failed.")] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Show how far the update of a fleet's pods is; exit code 1 if it failed or was stopped by a pod that failed."""
    cluster = connect(context, namespace, kubeconfig)
    fleet = cluster.object(PoCFleet, name)
    told = ""
    while watch and not _settled(fleet):
        if format_ is Format.TABLE and (line := rollout_lines(fleet)[0]) != told:
            told = line
            sys.stdout.write(f"{line}\n")
        time.sleep(LOOK_SECONDS)
        fleet = cluster.object(PoCFleet, name)
    if format_ is Format.TABLE:
        sys.stdout.write("\n".join(rollout_lines(fleet)) + "\n")
    else:
        found = fleet.status.update.model_dump(mode="json", by_alias=True, exclude_none=True)
        output.show({**found, "paused": fleet.spec.update.paused}, format_)
    if fleet.status.update.phase in (UpdatePhase.FAILED, UpdatePhase.STOPPED):
        raise typer.Exit(FAILED)


def _settled(fleet: PoCFleet) -> bool:
    seen = fleet.status.observed_generation >= fleet.metadata.generation
    return seen and fleet.status.update.phase in (UpdatePhase.COMPLETE, UpdatePhase.STOPPED, UpdatePhase.FAILED)


def rollout_lines(fleet: PoCFleet) -> list[str]:
    """Return how far an update is as lines of text."""
    update, wanted = fleet.status.update, fleet.spec.replicas
    paused = ", paused" if fleet.spec.update.paused else ""
    count = f"{fleet.status.updated_replicas} of {wanted} pods have the newest revision"
    lines = [f"{update.phase}{paused}: {count}{f'; {update.message}' if update.message else ''}"]
    if fleet.status.observed_generation < fleet.metadata.generation:
        lines.append("the operator has not acted on the last change of the spec yet")
    if update.canary and update.phase is UpdatePhase.CANARY:
        lines.append(f"canary: {update.canary}")
    lines += [f"failed: {one.revision} at {one.time:%Y-%m-%dT%H:%M:%SZ}: {one.message}" for one in update.failed]
    if paused:
        lines.append(
            f"go on with: kubectl poc -n {fleet.metadata.namespace} fleet rollout resume {fleet.metadata.name}"
        )
    return lines


@rollout.command()
def pause(
    name: FleetName,
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Replace no further pod until the update is resumed."""
    _set_paused(connect(context, namespace, kubeconfig), name, format_, paused=True)


@rollout.command()
def resume(
    name: FleetName,
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Go on with an update that was paused."""
    _set_paused(connect(context, namespace, kubeconfig), name, format_, paused=False)


def _set_paused(cluster: Cluster, name: str, format_: Format, *, paused: bool) -> None:
    word = "paused" if paused else "resumed"
    if cluster.object(PoCFleet, name).spec.update.paused is paused:
        raise UserError(f'the fleet "{name}" is {"paused" if paused else "not paused"} already: nothing was changed')
    path = f"{collection(PoCFleet, cluster.namespace)}/{name}"
    made = cluster.send("PATCH", path, {"spec": {"update": {"paused": paused}}})
    if format_ is Format.TABLE:
        sys.stdout.write(f"pocfleet.poc.gonka.ai/{name} {word}\n")
    else:
        output.show(made, format_)
