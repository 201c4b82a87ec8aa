# SPDX-License-Identifier: Apache-2.0
"""The tools that are built from Go modules: the table, where each one lies, and the build."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .common import UserError, cache, exclusive, run
from .steps import step

BUILD_LIMIT = 1800.0
_KUBERNETES = "k8s.io/kubernetes"
#: Nobody debugs these tools: without what debuggers read, they take an eighth less time to build.
GO_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-gcflags=all=-dwarf=false")


@dataclass(frozen=True)
class ToolSet:
    """Tools of one Go module, whose folder beside this file pins the versions in go.mod and go.sum."""

    name: str
    programs: Mapping[str, str]  # file name of a tool -> its Go package; one that begins with ./ is a folder of ours
    main_module: str
    tags: str = ""  # build tags, with commas between them
    version_variable: str = ""  # where the tools expect their own version, if they cannot know it otherwise
    within: str = ""  # the tool set whose module they are in, if it is not one of their own
    built_for: tuple[str, ...] = ()  # packages that expect the minor version of Kubernetes which the tools are for

    @property
    def module(self) -> Path:
        """The folder of the Go module."""
        return Path(__file__).parent / (self.within or self.name)

    @property
    def folder(self) -> Path:
        """The folder of the built tools; another pin or another flag gives another folder."""
        content = hashlib.sha256()
        for file in (self.module / "go.mod", self.module / "go.sum", *sorted(self.module.rglob("*.go"))):
            content.update(file.read_bytes())
        content.update("\0".join((*self.flags, *sorted(self.programs))).encode())
        return cache() / "tools" / f"{self.name}-{content.hexdigest()[:16]}"

    @property
    def version(self) -> str:
        """The pinned version of the main module."""
        return self._version_of(self.main_module)

    def _version_of(self, module: str) -> str:
        go_mod = self.module / "go.mod"
        requirement = rf"^\s*(?:require )?{re.escape(module)} (v\S+)"
        pin = re.search(requirement, go_mod.read_text(), re.MULTILINE)
        if pin is None:
            raise UserError(f"{go_mod} does not require {module}: add the requirement.")
        return pin.group(1)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of go build."""
        stamp = f" -X {self.version_variable}={self.version}" if self.version_variable else ""
        if self.built_for:
            major, minor, _ = self._version_of(_KUBERNETES).removeprefix("v").split(".", 2)
            stamps = (f" -X {one}.k8sVersionMajor={major} -X {one}.k8sVersionMinor={minor}" for one in self.built_for)
            stamp += "".join(stamps)
        tags = ("-tags", self.tags) if self.tags else ()
        return (*GO_FLAGS, *tags, "-ldflags", f"-s -w{stamp}")


def _kubernetes(name: str) -> tuple[str, str]:
    return name, f"{_KUBERNETES}/cmd/{name}"


KUBERNETES_TOOLS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)

#: Helm first: the tests of the docs wait for it. It and CoreDNS share a module with Kubernetes, so that the packages
#: that they need are compiled once. So Helm's minor version is one of those that use the cluster's client libraries.
TOOL_SETS = (
    ToolSet(
        name="helm",
        programs={"helm": "helm.sh/helm/v4/cmd/helm"},
        main_module="helm.sh/helm/v4",
        within="kubernetes",
        # Without them it renders charts for Kubernetes 1.20, where it is told no other version.
        built_for=("helm.sh/helm/v4/pkg/chart/common", "helm.sh/helm/v4/pkg/chart/v2/lint/rules"),
    ),
    ToolSet(
        name="kubernetes",
        programs={**dict(map(_kubernetes, KUBERNETES_TOOLS)), "coredns": "./coredns"},
        main_module=_KUBERNETES,
        version_variable="k8s.io/component-base/version.gitVersion",
    ),
    ToolSet(
        name="etcd",
        programs={"etcd": "go.etcd.io/etcd/server/v3"},
        main_module="go.etcd.io/etcd/server/v3",
    ),
)

#: For benchmarks and chaos tests alone: built when one of them asks for it.
KWOK = ToolSet(name="kwok", programs={"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, main_module="sigs.k8s.io/kwok")

#: For the tests of fleets whose replicas span several Kubernetes nodes: built when one of them asks for it.
LWS = ToolSet(
    name="lws",
    programs={"leaderworkerset": "sigs.k8s.io/lws/cmd"},
    main_module="sigs.k8s.io/lws",
    version_variable="sigs.k8s.io/lws/pkg/version.GitVersion",
)
#: For the tests of the alerts alone. Service discovery, which they do not need, would double the time of the build.
PROMETHEUS = ToolSet(
    name="prometheus",
    programs={"promtool": "github.com/prometheus/prometheus/cmd/promtool"},
    main_module="github.com/prometheus/prometheus",
    tags="remove_all_sd",
)
#: For the test of a release alone, which installs `kubectl poc` by it.
KREW = ToolSet(name="krew", programs={"krew": "sigs.k8s.io/krew/cmd/krew"}, main_module="sigs.k8s.io/krew")
#: For the test of a release alone, which signs as the workflow does, but with a key.
COSIGN = ToolSet(
    name="cosign",
    programs={"cosign": "github.com/sigstore/cosign/v2/cmd/cosign"},
    main_module="github.com/sigstore/cosign/v2",
)
#: What ``install`` leaves out.
ON_DEMAND = (KWOK, LWS, PROMETHEUS, KREW, COSIGN)
_ALL = (*TOOL_SETS, *ON_DEMAND)


def source_folder(tools: ToolSet) -> Path:
    """The folder with the sources of a tool set's main module, which go has downloaded when it built the tools."""
    return Path(run(["go", "list", "-m", "-f", "{{.Dir}}", tools.main_module], limit=60, cwd=tools.module).strip())


def tool_path(name: str) -> Path:
    """The path of a built tool."""
    for tools in _ALL:
        if name in tools.programs:
            path = tools.folder / name
            if not path.exists():
                raise UserError(f"The tool {name} is not built yet: run python3 -m hack.toolchain.")
            return path
    known = ", ".join(sorted(name for tools in _ALL for name in tools.programs))
    raise UserError(f"There is no tool {name}: choose one of {known}.")


def ensure_tools(tool_sets: Iterable[ToolSet] = TOOL_SETS) -> None:
    """Build those of the tool sets that are not in the cache, each by one process at a time."""
    for tools in tool_sets:
        if not tools.folder.exists():
            _require_go()
            with exclusive(f"toolchain-{tools.name}"):
                _ensure_built(tools)


def _ensure_built(tools: ToolSet) -> None:
    if tools.folder.exists():
        return
    with step(f"{tools.name} {tools.version}", of=tools.name):
        _build(tools)


def _require_go() -> None:
    if shutil.which("go") is None:
        raise UserError("The Go toolchain is missing: install Go 1.26 or newer and put go on the PATH.")


def _build(tools: ToolSet) -> None:
    """Build into a folder of its own and rename it last, so that a folder in the cache is always complete."""
    tools.folder.parent.mkdir(parents=True, exist_ok=True)
    # Empty GOFLAGS: the flags of the user's own environment are not part of the folder's hash.
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": ""}
    with tempfile.TemporaryDirectory(dir=tools.folder.parent, prefix=f".{tools.name}-") as scratch:
        output = Path(scratch) / "bin"
        output.mkdir()
        argv = ["go", "build", *tools.flags, "-o", str(output), *tools.programs.values()]
        run(argv, limit=BUILD_LIMIT, env=environment, cwd=tools.module)
        for name, package in tools.programs.items():
            (output / _go_name(package)).rename(output / name)
        output.rename(tools.folder)


def _go_name(package: str) -> str:
    """The file name that go build gives to a package: the last word of its path but for a major version."""
    return re.sub(r"/v\d+$", "", package).rsplit("/", 1)[-1]
