# SPDX-License-Identifier: Apache-2.0
"""``bundle``: an archive for whoever helps, without secrets."""

import io
import json
import sys
import tarfile
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.cli import VERSION, output
from poc_operator.cli.check_commands import checks
from poc_operator.cli.cluster import UNREACHABLE, Cluster, Object, UserError, collection, connect, core, parsed
from poc_operator.cli.explanation import account, sentences
from poc_operator.cli.gateway_proxy import SELECTOR as GATEWAY_SELECTOR
from poc_operator.cli.looking import OPERATOR_SELECTOR, SELECTING, evidence, look, now, readable, worker_pods
from poc_operator.cli.options import Context, GatewayPlace, Kubeconfig, Namespace, Output
from poc_operator.cli.output import Format
from poc_operator.cli.overview import overview
from poc_operator.cli.redaction import Redactor, variable_values

_KINDS: tuple[type[PoCRound] | type[PoCFleet] | type[PoCValidation] | type[PoCCalibration], ...] = (
    PoCRound,
    PoCFleet,
    PoCValidation,
    PoCCalibration,
)
#: Lines of each log, and explanations of each kind, at most.
LOG_LINES = 2000
_MOST_EXPLAINED = 50
_LOG_BYTES = 4 * 2**20
_PUBLIC_FIELDS = ("blockHash", "publicKey")

#: A file of the archive: its name, and what makes its text.
File = tuple[str, Callable[[], str]]


def bundle(
    *,
    file: Annotated[
        Path | None, typer.Option("--filename", "-f", help="Archive to write; without it poc-bundle-TIME.tar.gz.")
    ] = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    gateway: GatewayPlace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Write an archive with objects, Events, logs and checks of a namespace, without secrets."""
    cluster = connect(context, namespace, kubeconfig)
    _reach(cluster)
    target = file or Path(f"poc-bundle-{now():%Y%m%dT%H%M%SZ}.tar.gz")
    seen = Surroundings(cluster)
    redactor = seen.redactor()
    files, left_out = collected(contents(cluster, seen, gateway), redactor)
    left_out = [*map(redactor.text, seen.notes), *left_out]
    left = "".join(f"{line}\n" for line in left_out)
    archive({**files, "left-out.txt": left or "nothing\n"}, target)
    if format_ is not Format.TABLE:
        output.show({"file": str(target), "files": list(files), "leftOut": left_out}, format_)
        return
    sys.stdout.write(
        f"{target}: {len(files)} files; {len(left_out)} things could not be read, see left-out.txt in it\n"
    )


def _reach(cluster: Cluster) -> None:
    """UserError without an API server that answers, or the namespace: an archive of nothing would help nobody."""
    try:
        cluster.get("/version")
    except UserError as error:
        if error.code == UNREACHABLE:
            raise
    cluster.expect_namespace()


class Surroundings:
    """The pods and Deployments of fleets, operator and gateway, and what is known to be secret or public."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        work, self.notes = readable(cluster, cluster.namespace, SELECTING)
        self.pods = worker_pods(self._read, cluster.namespace, work)
        self.pods += [one for one in self._read(core("pods", cluster.namespace), FLEET_LABEL) if one not in self.pods]
        for selector in (OPERATOR_SELECTOR, GATEWAY_SELECTOR):
            self.pods += self._read(core("pods"), selector)
        self.deployments = [
            body
            for selector in (OPERATOR_SELECTOR, GATEWAY_SELECTOR)
            for body in self._read("/apis/apps/v1/deployments", selector)
        ]

    def _read(self, path: str, selector: str = "") -> list[Object]:
        try:
            return self._cluster.items(path, selector)
        except UserError as error:
            self.notes.append(f"{path}: {error}")
            return []

    def redactor(self) -> Redactor:
        """Return what takes secrets out: it knows the values of variables and of the Secrets that may be read."""
        specs = [body["spec"] for body in self.pods]
        secrets = [value for spec in specs for value in variable_values(spec)]
        namespaces = {self._cluster.namespace, *(body["metadata"]["namespace"] for body in self.pods)}
        for namespace in sorted(namespaces):
            secrets += [value for body in self._read(core("secrets", namespace)) for value in secret_values(body)]
        rounds = self._read(collection(PoCRound, self._cluster.namespace))
        public = [str(body["spec"].get(field, "")) for body in rounds for field in _PUBLIC_FIELDS]
        return Redactor(secrets, public)


def secret_values(body: Object) -> Iterator[str]:
    """Return the values of a Secret as texts, and each part of those that have several."""
    for value in (body.get("data") or {}).values():
        try:
            text = b64decode(value).decode()
        except (Base64Error, UnicodeDecodeError):
            continue
        yield text
        yield from (part.strip() for part in text.split(","))


def contents(cluster: Cluster, seen: Surroundings, gateway: str | None) -> Iterator[File]:
    """Return the files of the archive, each made when it is asked for."""
    yield "version.txt", lambda: f"kubectl-poc {VERSION}\n{now():%Y-%m-%dT%H:%M:%SZ}\n"
    yield "check.json", lambda: _json([one.model_dump(mode="json") for one in checks(cluster, gateway)])
    yield "status.json", lambda: _json(overview(look(cluster, everywhere=False, chat=True)).model_dump(mode="json"))
    for path in (collection(kind, cluster.namespace) for kind in _KINDS):
        yield f"objects/{path.rpartition('/')[2]}.yaml", partial(_list, cluster, path)
    yield "objects/pods.yaml", lambda: _yaml(seen.pods)
    yield "objects/deployments.yaml", lambda: _yaml(seen.deployments)
    for path in (
        f"/apis/apps/v1/namespaces/{cluster.namespace}/statefulsets",
        core("persistentvolumeclaims", cluster.namespace),
        core("services", cluster.namespace),
        core("events", cluster.namespace),
    ):
        yield f"objects/{path.rpartition('/')[2]}.yaml", partial(_list, cluster, path)
    yield "explanations.txt", lambda: "\n\n".join(_explanations(cluster))
    for pod in seen.pods:
        yield from _logs(cluster, pod)


def _explanations(cluster: Cluster) -> Iterator[str]:
    for kind in _KINDS:
        for body in cluster.items(collection(kind, cluster.namespace))[-_MOST_EXPLAINED:]:
            yield "\n".join(sentences(account(evidence(cluster, parsed(kind, body)))))


def _logs(cluster: Cluster, pod: Object) -> Iterator[File]:
    meta = pod["metadata"]
    restarted = {one["name"] for one in (pod.get("status") or {}).get("containerStatuses") or [] if one["restartCount"]}
    for box in pod["spec"]["containers"]:
        for previous in ("false", "true") if box["name"] in restarted else ("false",):
            query = {
                "container": box["name"],
                "tailLines": str(LOG_LINES),
                "limitBytes": str(_LOG_BYTES),
                "previous": previous,
            }
            path = f"{core('pods', meta['namespace'])}/{meta['name']}/log"
            end = "-previous" if previous == "true" else ""
            name = f"logs/{meta['namespace']}/{meta['name']}-{box['name']}{end}.log"
            yield name, partial(_log, cluster, path, query)


def _log(cluster: Cluster, path: str, query: Mapping[str, str]) -> str:
    return cluster.text(path, query).decode(errors="replace")


def _list(cluster: Cluster, path: str) -> str:
    return _yaml(cluster.items(path))


def _yaml(bodies: Iterable[Object]) -> str:
    return yaml.safe_dump_all((dict(body) for body in bodies), sort_keys=False, allow_unicode=True)


def _json(data: Any) -> str:  # noqa: ANN401 - JSON
    return json.dumps(data, indent=2)


def collected(files: Iterable[File], redactor: Redactor) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the files without secrets, and which files could not be read, with the reason."""
    found, left_out = dict[str, str](), list[str]()
    for name, make in files:
        try:
            found[name] = clean(name, make(), redactor)
        except UserError as error:
            left_out.append(redactor.text(f"{name}: {error}"))
    return found, left_out


def clean(name: str, text: str, redactor: Redactor) -> str:
    """Return a file's text without secrets: objects by their fields, everything else as text."""
    if name.endswith(".yaml"):
        return _yaml(redactor.body(body) for body in yaml.safe_load_all(text) if body is not None)
    if name.endswith(".json"):
        return _json(redactor.body(json.loads(text)))
    return redactor.text(text)


def archive(files: dict[str, str], target: Path) -> None:
    """Write the files into a tar.gz that nobody else may read."""
    try:
        with tarfile.open(target, "w:gz") as tar:
            target.chmod(0o600)
            for name, text in files.items():
                data = text.encode()
                entry = tarfile.TarInfo(f"poc-bundle/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(now().timestamp())
                tar.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise UserError(f'--filename: "{target}" cannot be written ({error.strerror}): name another file') from error
