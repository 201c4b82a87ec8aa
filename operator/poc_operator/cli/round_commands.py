# SPDX-License-Identifier: Apache-2.0
"""``round``: create rounds, watch them, and read what came out through the gateway."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from poc_operator.apis.v1alpha1.meta import API_VERSION, Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import State
from poc_operator.cli import gateway_proxy, output, plots
from poc_operator.cli.cluster import FAILED, Cluster, NotFound, UserError, collection, connect
from poc_operator.cli.looking import now, overviews
from poc_operator.cli.options import Context, GatewayPlace, Kubeconfig, Namespace, Output, RoundName
from poc_operator.cli.output import Format, number
from poc_operator.cli.overview import Overview, Seen
from poc_operator.cli.overview_tables import tables
from poc_operator.cli.pod_metrics import active_pods, read_chat

app = typer.Typer(help="Create rounds, watch them, read and export their results.", no_args_is_help=True)

WATCH_SECONDS = 2.0
#: Set as ``fieldManager`` of what the plugin creates.
MANAGER = "kubectl-poc"


@app.command()
def create(
    *,
    file: Annotated[Path, typer.Option("--filename", "-f", help="Manifest of a PoCRound, or - for standard input.")],
    name: Annotated[str | None, typer.Option(help="Another name than the manifest's.")] = None,
    block_hash: Annotated[str | None, typer.Option(help="Another block hash.")] = None,
    block_height: Annotated[int | None, typer.Option(help="Another block height.")] = None,
    public_key: Annotated[str | None, typer.Option(help="Another public key.")] = None,
    seconds: Annotated[int | None, typer.Option(min=1, help="Complete after so many seconds.")] = None,
    nonces: Annotated[int | None, typer.Option(min=1, help="Complete after so many nonces.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check it, and create nothing.")
    ] = False,
    watch_it: Annotated[bool, typer.Option("--watch", "-w", help="Watch it until it is over.")] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Create a round of a manifest, with some fields changed. With json or yaml, --watch shows it once it is over."""
    cluster = connect(context, namespace, kubeconfig)
    changes = {
        "blockHash": block_hash,
        "blockHeight": block_height,
        "publicKey": public_key,
        "stop": _stop(seconds, nonces),
    }
    manifest = changed(read_manifest(file, PoCRound), name, changes)
    made = create_object(cluster, PoCRound, manifest, dry_run=dry_run)
    watched = watch_it and not dry_run
    if format_ is Format.TABLE or not watched:  # programs get one document: what `round watch` shows them
        tell_created(PoCRound, made, format_, dry_run=dry_run)
    if watched:
        follow(cluster, made["metadata"]["name"], made["metadata"]["namespace"], format_)


def _stop(seconds: int | None, nonces: int | None) -> Mapping[str, int] | None:
    if seconds is not None and nonces is not None:
        raise UserError("--seconds and --nonces exclude each other: leave one out", 2)
    return {"afterSeconds": seconds} if seconds else {"afterNonces": nonces} if nonces else None


def read_manifest(file: Path, kind: type[Resource]) -> dict[str, Any]:
    """Return the manifest of a kind in a file, or in standard input for ``-``."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        body = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f'--filename: "{file}" cannot be read ({why}): name a file with a manifest') from error
    except yaml.YAMLError as error:
        raise UserError(f'--filename: "{file}" is no YAML ({" ".join(str(error).split())}): correct it') from error
    wanted = kind.KIND.kind
    if not isinstance(body, dict) or body.get("kind") != wanted or not isinstance(body.get("spec"), dict):
        raise UserError(f'--filename: "{file}" must have one manifest of the kind {wanted}, with a spec')
    return body


def changed(manifest: Mapping[str, Any], name: str | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with another name and other fields of the spec, as far as they are given."""
    spec = {**manifest["spec"], **{field: value for field, value in changes.items() if value is not None}}
    metadata = dict(manifest.get("metadata") or {})
    if name:
        metadata["name"] = name
    if not metadata.get("name") and not metadata.get("generateName"):
        raise UserError("the manifest has no metadata.name: set it, or use --name")
    return {**manifest, "apiVersion": manifest.get("apiVersion", API_VERSION), "metadata": metadata, "spec": spec}


def create_object(cluster: Cluster, kind: type[Resource], manifest: dict[str, Any], *, dry_run: bool) -> Any:  # noqa: ANN401 - JSON
    """Create an object in the namespace of its manifest, else in the cluster's; return it as it is stored."""
    where = manifest["metadata"].get("namespace") or cluster.namespace
    query = {"fieldManager": MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    return cluster.send("POST", collection(kind, where), manifest, query)


def tell_created(kind: type[Resource], made: Mapping[str, Any], format_: Format, *, dry_run: bool) -> None:
    """Say that an object was created, as kubectl does."""
    if format_ is not Format.TABLE:
        output.show(made, format_)
        return
    end = " (server dry run)" if dry_run else ""
    sys.stdout.write(f"{kind.KIND.singular}.poc.gonka.ai/{made['metadata']['name']} created{end}\n")


@app.command()
def watch(
    name: RoundName,
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Watch a round until it is over; exit code 1 if it failed. With json or yaml, show it once it is over."""
    cluster = connect(context, namespace, kubeconfig)
    follow(cluster, name, cluster.namespace, format_)


def follow(cluster: Cluster, name: str, namespace: str, format_: Format = Format.TABLE) -> None:
    """Show a round until it is over. ``typer.Exit`` if it failed; UserError if it is deleted meanwhile."""
    looks = _looks(cluster, name, namespace)
    last = output.follow(looks, _shown) if format_ is Format.TABLE else deque(looks, maxlen=1)[0]
    if last is None:
        return
    if format_ is not Format.TABLE:
        output.show(last.rounds[0].model_dump(mode="json", by_alias=True), format_)
    if last.rounds[0].state == State.FAILED:
        raise typer.Exit(FAILED)


def _shown(found: Overview) -> RenderableType:
    return Group(tables(found, everywhere=False), Text(found.rounds[0].message))


def _looks(cluster: Cluster, name: str, namespace: str) -> Iterator[Overview]:
    def look_once() -> Seen:
        found = cluster.object(PoCRound, name, namespace)
        return Seen(now=now(), rounds=[found], chat=read_chat(cluster, active_pods([found])))

    return overviews(look_once, WATCH_SECONDS, over=lambda seen: seen.rounds[0].status.state.finished)


@app.command()
def results(
    name: RoundName,
    *,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw the rate over time and the histogram into this new file.")
    ] = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    gateway: GatewayPlace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Show what the gateway has of a round: counts, rate over time, a histogram, what is forwarded, conflicts."""
    if png is not None:
        plots.check_png(png)
    cluster = connect(context, namespace, kubeconfig)
    asked = gateway_proxy.find(cluster, gateway)
    found = _read_results(asked, cluster.namespace, name)
    rates = _read_rates(asked, cluster.namespace, name)
    if format_ is Format.TABLE:
        sys.stdout.write("\n".join(result_lines(found, rates)) + "\n")
    else:
        if isinstance(rates, str):
            sys.stderr.write(f"rate over time: {rates}\n")
        output.show({**found, "rates": None if isinstance(rates, str) else rates}, format_)
    if png is not None:
        plots.write_png(png, found["summary"], rates)
        sys.stderr.write(f"plots drawn into {png}\n")


def _read_results(asked: gateway_proxy.Gateway, namespace: str, name: str) -> dict[str, Any]:
    route = f"/rounds/{namespace}/{name}"
    try:
        return {
            "summary": asked.get(f"{route}/summary"),
            "forwarding": asked.get(f"{route}/forwarding"),
            "conflicts": asked.get(f"{route}/conflicts", {"limit": "10"})["conflicts"],
        }
    except NotFound as error:
        raise _unknown(asked, namespace, name) from error


def _read_rates(asked: gateway_proxy.Gateway, namespace: str, name: str) -> plots.Told | str:
    """Return how fast the results came, or why the gateway does not tell it: all else is worth showing."""
    try:
        told: plots.Told = asked.get(f"/rounds/{namespace}/{name}/rates")
    except NotFound:  # an older gateway has no such route
        return plots.OLDER_GATEWAY
    except UserError as error:
        return str(error)
    return told


def _unknown(asked: gateway_proxy.Gateway, namespace: str, name: str) -> NotFound:
    return NotFound(
        f'the gateway {asked.place} has nothing of a round "{name}" in the namespace "{namespace}": '
        f"look why with `kubectl poc -n {namespace} explain {name}`"
    )


def result_lines(found: Mapping[str, Any], rates: plots.Told | str) -> list[str]:
    """Return what the gateway has of a round as lines of text; ``rates`` may say why there are none."""
    summary, known = found["summary"], found["summary"]["round"]
    rate = f", {summary['rate']:.1f}/s" if summary["rate"] is not None else ""
    receiver = (found["forwarding"] or {}).get("receiver")
    sent = f"forwarded {number(known['forwarded'])} of {number(known['stored'])}"
    lines = [
        f"{known['namespace']}/{known['name']}: {number(known['stored'])} results of {known['slots']} slots{rate}",
        f"first {summary['first_arrival'] or '–'}, last {summary['last_arrival'] or '–'}",  # noqa: RUF001
        f"duplicates {known['duplicates']}, conflicts {known['conflicts']}, refused by the receiver {known['dead']}",
        sent if receiver or known["forwarded"] else "no receiver: all are kept at the gateway",
    ]
    if known["limit_reached"]:
        lines.append(f"new results are not stored: {known['limit_reached']}")
    lines += [f"{key.replace('_', ' ')}: {value}" for key, value in _told(found["forwarding"])]
    lines += ["", *plots.rate_lines(rates), "", *plots.histogram_lines(summary["histogram"])]
    conflicts = found["conflicts"]
    if conflicts:
        lines += ["", "First conflicts:"]
        lines += [f"  nonce {one['nonce']}: {one.get('stored_pod')} and {one.get('pod')}" for one in conflicts]
    return lines


def _told(forwarding: Mapping[str, Any]) -> list[tuple[str, Any]]:
    wanted = ("receiver", "backlog", "expired", "abandoned", "last_error")
    told = [(key, forwarding[key]) for key in wanted if forwarding.get(key)]
    waits = forwarding.get("backlog") and forwarding.get("last_error") and forwarding.get("next_try_seconds")
    return [*told, ("next try", f"in {max(1, round(waits))} s")] if waits else told


@app.command()
def export(
    name: RoundName,
    *,
    kind: Annotated[str, typer.Option("--format", help="jsonl, csv or parquet.")] = "jsonl",
    file: Annotated[
        Path | None, typer.Option("--filename", "-f", help="File to write; standard output without it.")
    ] = None,
    slot: Annotated[int | None, typer.Option(help="Only this slot.")] = None,
    below: Annotated[float | None, typer.Option(help="Only distances below this number.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many results.")] = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    gateway: GatewayPlace = None,
) -> None:
    """Write all results of a round, as the gateway streams them."""
    if kind not in {"jsonl", "csv", "parquet"}:
        raise UserError(f'--format: "{kind}" is no format: use jsonl, csv or parquet', 2)
    cluster = connect(context, namespace, kubeconfig)
    asked = gateway_proxy.find(cluster, gateway)
    filters = {"format": kind, "slot": slot, "below": below, "limit": limit}
    query = {key: str(value) for key, value in filters.items() if value is not None}
    pieces = asked.stream(f"/rounds/{cluster.namespace}/{name}/artifacts", query)
    try:
        size = write(pieces, file)
    except NotFound as error:
        raise _unknown(asked, cluster.namespace, name) from error
    if file is not None:
        sys.stderr.write(f"{number(size)} bytes written to {file}\n")


def write(pieces: Iterator[bytes], file: Path | None) -> int:
    """Write pieces to a file, or to standard output; return their size. An export that breaks off leaves no file."""
    if file is None:
        return sum(sys.stdout.buffer.write(piece) for piece in pieces)
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as target:
            size = sum(target.write(piece) for piece in pieces)
        part.replace(file)
    except OSError as error:
        raise UserError(f'--filename: "{file}" cannot be written ({error.strerror}): name another file') from error
    finally:
        with suppress(OSError):  # what could not be made cannot be removed either
            part.unlink(missing_ok=True)
    return size
