# SPDX-License-Identifier: Apache-2.0
"""``fleet``: which presets there are, how an update of a fleet's pods gets on, and the way back.

As with a Deployment, `undo` changes the spec, which the operator then follows as any other change: one canary first,
between rounds. So nothing fights with it, except a tool that keeps the object as it is in Git.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Any

import typer

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import UpdatePhase
from poc_operator.apis.v1alpha1.fleet_upkeep import UpdateStrategy
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.cli import output
from poc_operator.cli.cluster import (
    FAILED,
    Cluster,
    NotFound,
    Object,
    UserError,
    collection,
    connect,
    core,
    parsed,
)
from poc_operator.cli.looking import deployments
from poc_operator.cli.options import Context, FleetName, Kubeconfig, Namespace, Output
from poc_operator.cli.output import NONE, Column, Format
from poc_operator.fleets.history import (
    Revision,
    UndoError,
    changes,
    present,
    record_of,
    restored,
    revisions_of,
    target,
)
from poc_operator.fleets.resolve import Invalid, Presets, packaged, with_config_maps

app = typer.Typer(help="List presets; follow, pause and undo updates of pods.", no_args_is_help=True)
rollout = typer.Typer(help="Follow, pause and undo the update of a fleet's pods.", no_args_is_help=True)
app.add_typer(rollout, name="rollout")

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
_REVISIONS = (Column("REVISION"), Column("NAME", rank=1), Column("AGE", rank=2), Column("STATE"), Column("MESSAGE"))
#: Labels and annotations by which a tool marks an object that it keeps as it is in Git.
_KEPT_BY: Mapping[str, str] = {
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
    "argocd.argoproj.io/tracking-id": "Argo CD",
    "argocd.argoproj.io/instance": "Argo CD",
}
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


@rollout.command()
def history(
    name: FleetName,
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Show the revisions of a fleet's pods, and what the spec of each changed."""
    cluster = connect(context, namespace, kubeconfig)
    fleet = cluster.object(PoCFleet, name)
    stateful_set, found = _revisions(cluster, fleet)
    if format_ is not Format.TABLE:
        output.show([_revision(fleet, stateful_set, revision) for revision in found], format_)
        return
    told = ["", *(changes(one.record, next_.record) for one, next_ in pairwise(found))][: len(found)]
    rows = [
        (str(one.number), one.name, _age(one), _state(fleet, stateful_set, one) or NONE, change)
        for one, change in zip(found, told, strict=True)
    ]
    output.console().print(output.table("", _REVISIONS, rows))


@rollout.command()
def undo(
    name: FleetName,
    *,
    to_revision: Annotated[
        int | None, typer.Option("--to-revision", help="Its number in the history; else the one before.", min=1)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, and let the API server check it.")
    ] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Set the spec of a fleet's pods back to that of an earlier revision."""
    cluster = connect(context, namespace, kubeconfig)
    body = cluster.body(PoCFleet, name)
    fleet = parsed(PoCFleet, body)
    stateful_set, found = _revisions(cluster, fleet)
    try:
        revision = target(fleet, stateful_set, found, to_revision)
        spec = restored(body["spec"], revision)
    except UndoError as error:
        raise UserError(f'the fleet "{name}" cannot go back: {error}') from error
    path = f"{collection(PoCFleet, cluster.namespace)}/{name}"
    made = cluster.send("PUT", path, {**body, "spec": spec}, {"dryRun": "All"} if dry_run else {})
    if format_ is not Format.TABLE:
        output.show(made, format_)
        return
    sys.stdout.write("\n".join([_done(fleet, revision, dry_run=dry_run), *_hints(fleet, body)]) + "\n")


def _revisions(cluster: Cluster, fleet: PoCFleet) -> tuple[Object, Sequence[Revision]]:
    metadata = fleet.metadata
    if fleet.spec.kubernetes_nodes > 1:
        raise UserError(
            f'the replicas of the fleet "{metadata.name}" span several Kubernetes nodes, and LeaderWorkerSet keeps no '
            "record of specs: apply the earlier spec"
        )
    path = f"/apis/apps/v1/namespaces/{metadata.namespace}"
    try:
        stateful_set = cluster.get(f"{path}/statefulsets/{metadata.name}")
    except NotFound as error:
        raise UserError(f'the fleet "{metadata.name}" has no StatefulSet yet, and so no revisions') from error
    bodies = cluster.items(f"{path}/controllerrevisions", f"{FLEET_LABEL}={metadata.name}")
    return stateful_set, revisions_of(stateful_set, bodies)


def _state(fleet: PoCFleet, stateful_set: Object, revision: Revision) -> str:
    update = fleet.status.update
    words = {
        "present": revision.name == present(fleet, stateful_set),
        "good": revision.name == update.good_revision,
        "failed": revision.name in {one.revision for one in update.failed},
    }
    return ", ".join(word for word, holds in words.items() if holds)


def _revision(fleet: PoCFleet, stateful_set: Object, revision: Revision) -> Object:
    return {
        "revision": revision.number,
        "name": revision.name,
        "created": revision.created,
        "state": _state(fleet, stateful_set, revision),
        "spec": revision.record,
    }


def _age(revision: Revision) -> str:
    try:
        return output.age(datetime.fromisoformat(revision.created), datetime.now(UTC))
    except ValueError:
        return NONE


def _done(fleet: PoCFleet, revision: Revision, *, dry_run: bool) -> str:
    word, change = "would go" if dry_run else "goes", changes(record_of(fleet.spec), revision.record)
    return f"pocfleet.poc.gonka.ai/{fleet.metadata.name} {word} back to {revision}: {change}"


def _hints(fleet: PoCFleet, body: Object) -> list[str]:
    """Return what keeps the pods from changing now, and who may take the change back."""
    metadata, update, lines = fleet.metadata, fleet.spec.update, list[str]()
    marks = {**(body["metadata"].get("labels") or {}), **(body["metadata"].get("annotations") or {})}
    keeper = next((tool for mark, tool in _KEPT_BY.items() if mark in marks), None)
    if keeper is not None:
        lines.append(f"{keeper} keeps this fleet as it is in Git: change it there too, or the change comes back")
    command = f"kubectl poc -n {metadata.namespace} fleet rollout"
    if update.paused:
        lines.append(f"the update is paused: go on with `{command} resume {metadata.name}`")
    elif update.strategy is UpdateStrategy.NEVER:
        lines.append("update.strategy is Never: delete the pods yourself when no round runs")
    else:
        lines.append(f"follow it with: {command} status {metadata.name} -w")
    return lines
