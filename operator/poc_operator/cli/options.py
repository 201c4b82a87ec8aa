# SPDX-License-Identifier: Apache-2.0
"""Options that commands share, and what completes names of objects."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.cli.cluster import UserError, connect
from poc_operator.cli.output import Format

#: Kinds that ``explain`` takes beside rounds, by the word before the name.
_OTHER_KINDS: Mapping[str, type[Resource]] = {
    "fleet": PoCFleet,
    "validation": PoCValidation,
    "calibration": PoCCalibration,
}


def _names(context: typer.Context, kind: type[Resource]) -> list[str]:
    """Return the names of a kind's objects, as far as the cluster tells: completion says no errors."""
    kubeconfig = _given(context, "kubeconfig")
    try:
        cluster = connect(
            _given(context, "context"), _given(context, "namespace"), Path(kubeconfig) if kubeconfig else None
        )
        return [found.metadata.name for found in cluster.objects(kind, cluster.namespace)]
    except UserError:
        return []


def _given(context: typer.Context, name: str) -> str | None:
    """Return an option that stands behind the command, or before it."""
    found = context.params.get(name)
    above = context.parent
    while not found and above is not None:
        found, above = above.params.get(name), above.parent
    return found


def complete_round(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of rounds that begin with ``incomplete``."""
    return [name for name in _names(ctx, PoCRound) if name.startswith(incomplete)]


def complete_fleet(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of fleets that begin with ``incomplete``."""
    return [name for name in _names(ctx, PoCFleet) if name.startswith(incomplete)]


def complete_subject(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return what ``explain`` takes: names of rounds, and of the other kinds' objects with their kind."""
    found = [] if "/" in incomplete else _names(ctx, PoCRound)
    for word, kind in _OTHER_KINDS.items():
        if f"{word}/".startswith(incomplete) or incomplete.startswith(f"{word}/"):  # else nobody need be asked
            found += [f"{word}/{name}" for name in _names(ctx, kind)]
    return [name for name in found if name.startswith(incomplete)]


Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", help="File to use instead of KUBECONFIG.", show_default=False)
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace, if not that of the context.", show_default=False)
]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Objects of all namespaces.")]
Output = Annotated[Format, typer.Option("--output", "-o", help="How to write the result.")]
GatewayPlace = Annotated[
    str | None,
    typer.Option(
        "--gateway", help="NAMESPACE/NAME of the gateway's Service, if there are several.", show_default=False
    ),
]
RoundName = Annotated[str, typer.Argument(help="Name of a PoCRound.", autocompletion=complete_round, metavar="ROUND")]
FleetName = Annotated[str, typer.Argument(help="Name of a PoCFleet.", autocompletion=complete_fleet, metavar="FLEET")]
SubjectName = Annotated[
    str,
    typer.Argument(
        help="A name, or round/NAME, fleet/NAME, validation/NAME, calibration/NAME where several have it.",
        autocompletion=complete_subject,
        metavar="NAME",
    ),
]
