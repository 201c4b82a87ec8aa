# SPDX-License-Identifier: Apache-2.0
"""``fleet rollout history`` and ``undo``: the revisions of a fleet's pods, and the way back to one of them.

As with a Deployment, `undo` changes the spec, which the operator then follows as any other change: one canary first,
between rounds. So nothing fights with it, except a tool that keeps the object as it is in Git.
"""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated

import typer

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import UpdateStrategy
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.cli import output
from poc_operator.cli.cluster import Cluster, NotFound, Object, UserError, collection, connect, parsed
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

_COLUMNS = (Column("REVISION"), Column("NAME", rank=1), Column("AGE", rank=2), Column("STATE"), Column("MESSAGE"))
#: Labels and annotations by which a tool marks an object that it keeps as it is in Git.
_KEPT_BY: Mapping[str, str] = {
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
    "argocd.argoproj.io/tracking-id": "Argo CD",
    "argocd.argoproj.io/instance": "Argo CD",
}


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
        output.show([_data(fleet, stateful_set, revision) for revision in found], format_)
        return
    told = ["", *(changes(one.record, next_.record) for one, next_ in pairwise(found))][: len(found)]
    rows = [
        (str(one.number), one.name, _age(one), _state(fleet, stateful_set, one) or NONE, change)
        for one, change in zip(found, told, strict=True)
    ]
    output.console().print(output.table("", _COLUMNS, rows))


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


def _data(fleet: PoCFleet, stateful_set: Object, revision: Revision) -> Object:
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
