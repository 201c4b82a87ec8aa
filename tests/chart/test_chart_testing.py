# SPDX-License-Identifier: Apache-2.0
"""What `ct lint` of chart-testing would check of each chart; docs/develop/releasing.md says which test holds what."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.images.site import ROOT
from hack.release.chart_version import check_increment, git, order
from hack.toolchain.common import UserError, run
from hack.toolchain.tools import tool_path
from tests.chart.rendered import LIMIT, ensure, objects, pods

pytestmark = pytest.mark.timeout(60, func_only=True)

CHARTS = sorted(path.parent for path in (ROOT / "charts").glob("*/Chart.yaml"))
#: Where chart-testing looks for values.
VALUES = sorted(path for chart in CHARTS for path in chart.glob("ci/*-values.yaml"))
#: What a file is for, by a kind and the end of a name: whether that object is there.
EFFECTS: dict[str, tuple[str, str, bool]] = {
    "default-values": ("CustomResourceDefinition", "pocrounds.poc.gonka.ai", True),
    "namespaced-values": ("ClusterRole", "-edit:poc-system", False),
    "operator-only-values": ("Deployment", "-gateway", False),
    "monitoring-values": ("ConfigMap", "-dashboard-rounds", True),
}


def about(chart: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text())
    return found


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_a_chart_says_what_chart_testing_asks_for(chart: Path) -> None:
    found = about(chart)
    for name in ("name", "home", "version", "apiVersion", "description", "icon", "kubeVersion", "type"):
        assert isinstance(found[name], str), name
        assert found[name], name
    assert found["name"] == chart.name
    assert found["home"].startswith("https://")
    assert found["sources"]
    assert all(source.startswith("https://") for source in found["sources"])
    # Strings alone, which a version without quotes would not be.
    assert all(isinstance(value, str) for value in found["annotations"].values())


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_maintainers_are_accounts_that_own_the_code(chart: Path) -> None:
    owners = (ROOT / ".github" / "CODEOWNERS").read_text()
    maintainers = about(chart)["maintainers"]
    assert maintainers
    for one in maintainers:
        assert one.keys() <= {"name", "email", "url"}
        assert one["url"] == f"https://github.com/{one['name']}"
        assert f"@{one['name']}/" in owners


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_chart_testing_finds_every_file_of_values_and_the_defaults_among_them(chart: Path) -> None:
    files = {path.name for path in (chart / "ci").iterdir()}
    assert files == {path.name for path in chart.glob("ci/*-values.yaml")}
    assert yaml.safe_load((chart / "ci" / "default-values.yaml").read_text()) == {}


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_a_chart_is_linted_with_each_file_of_values(path: Path) -> None:
    ensure()
    chart = path.parents[1]
    run([tool_path("helm"), "lint", "--strict", chart, "--values", path], limit=LIMIT)


def test_a_wrong_file_of_values_is_found(tmp_path: Path) -> None:
    ensure()
    wrong = tmp_path / "wrong-values.yaml"
    wrong.write_text("gateway: {enabeld: false}\n")
    with pytest.raises(UserError, match="enabeld"):
        run([tool_path("helm"), "lint", "--strict", CHARTS[0], "--values", wrong], limit=LIMIT)


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_each_file_of_values_does_what_it_is_for_where_the_crds_are_installed(path: Path) -> None:
    ensure()
    bodies = objects(path)
    assert has(bodies, path.stem)
    assert has(objects({}), path.stem) == (path.stem == "default-values")
    # A second release cannot own the CRDs, which are kept when the first is uninstalled.
    assert any(one["kind"] == "CustomResourceDefinition" for one in bodies) == (path.stem == "default-values")
    # No kind that its cluster may lack, and no Secret that somebody would have to make.
    assert not [one["kind"] for one in bodies if "monitoring.coreos.com" in one["apiVersion"]]
    made = {one["metadata"]["name"] for one in bodies if one["kind"] == "Secret"}
    assert set(_secrets(list(pods(bodies).values()))) <= made


def has(bodies: list[dict[str, Any]], stem: str) -> bool:
    """Whether these objects are those that the file of values is for."""
    kind, ending, there = EFFECTS[stem]
    return any(one["kind"] == kind and one["metadata"]["name"].endswith(ending) for one in bodies) == there


def _secrets(found: object) -> list[str]:
    """Return the Secrets that containers and volumes need."""
    if isinstance(found, list):
        return [name for one in found for name in _secrets(one)]
    if not isinstance(found, dict):
        return []
    own = [found[key] for key in ("secretName",) if isinstance(found.get(key), str)]
    reference = found.get("secretKeyRef") or found.get("secretRef") or {}
    named = [reference["name"]] if reference and not reference.get("optional") else []
    return [*own, *named, *(name for value in found.values() for name in _secrets(value))]


class Repository:
    """A scratch repository with one chart."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.git("init", "--quiet")
        self.write("Chart.yaml", "name: demo\nversion: 0.1.0\n")
        self.write("values.yaml", "a: 1\n")
        self.commit()

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        unsigned = ("-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false")
        git(self.root, *identity, *unsigned, *arguments)

    def write(self, name: str, content: str) -> None:
        path = self.root / "charts" / "demo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")

    def check(self) -> str | None:
        return check_increment(self.root, "charts/demo")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_before_the_first_release_nothing_is_asked_for(repository: Repository) -> None:
    repository.git("tag", "nightly")
    repository.write("values.yaml", "a: 2\n")
    assert repository.check() is None


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("name", ["values.yaml", "templates/new.yaml"])
def test_a_changed_chart_needs_a_higher_version(repository: Repository, name: str, *, committed: bool) -> None:
    repository.git("tag", "v0.1.0")
    assert repository.check() == "v0.1.0"
    repository.write(name, "a: 2\n")
    if committed:
        repository.commit()
    with pytest.raises(UserError, match=r"charts/demo has changed since v0\.1\.0 and still has version 0\.1\.0"):
        repository.check()
    repository.write("Chart.yaml", "name: demo\nversion: 0.0.9\n")
    with pytest.raises(UserError, match=r"raise it above 0\.1\.0"):
        repository.check()
    repository.write("Chart.yaml", "name: demo\nversion: 0.1.1\n")
    assert repository.check() == "v0.1.0"
    # The next release is what the next change is compared with.
    repository.commit()
    repository.git("tag", "v0.1.1")
    assert repository.check() == "v0.1.1"
    repository.write(name, "a: 3\n")
    with pytest.raises(UserError, match=r"since v0\.1\.1"):
        repository.check()


def test_the_highest_release_before_the_commit_counts(repository: Repository) -> None:
    for tag in ("v0.9.0", "v0.10.0-rc.1", "v0.10.0", "v0.2.0"):
        repository.git("tag", tag)
    assert repository.check() == "v0.10.0"
    # A release of another branch is not one that this commit follows.
    repository.git("checkout", "--quiet", "-b", "other")
    repository.write("Chart.yaml", "name: demo\nversion: 2.0.0\n")
    repository.commit()
    repository.git("tag", "v2.0.0")
    assert repository.check() == "v2.0.0"
    repository.git("checkout", "--quiet", "-")
    assert repository.check() == "v0.10.0"


def test_a_git_that_fails_is_not_taken_for_a_chart_without_a_release(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a git repository"):
        check_increment(tmp_path, "charts/demo")


def test_neither_the_environment_of_a_hook_nor_the_users_settings_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Git sets such variables for hooks, and they win over the folder that a command runs in.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text("[tag]\n\tgpgSign = true\n[commit]\n\tgpgSign = true\n")
    repository = Repository(tmp_path / "repository")
    repository.git("tag", "v0.1.0")
    assert repository.check() == "v0.1.0"
    repository.write("values.yaml", "a: 2\n")
    with pytest.raises(UserError, match=r"has changed since v0\.1\.0"):
        repository.check()


def test_other_files_and_new_charts_need_no_version(repository: Repository) -> None:
    (repository.root / "README.md").write_text("a")
    repository.git("tag", "v0.1.0")
    repository.commit()
    (repository.root / "README.md").write_text("b")
    repository.commit()
    assert repository.check() == "v0.1.0"
    (repository.root / "charts" / "new").mkdir()
    (repository.root / "charts" / "new" / "Chart.yaml").write_text("version: 0.0.1\n")
    assert check_increment(repository.root, "charts/new") == "v0.1.0"


def test_versions_are_ordered_as_semver_says() -> None:
    rising = ["0.9.9", "0.10.0-2", "0.10.0-10", "0.10.0-alpha", "0.10.0-alpha.1", "0.10.0-rc.1", "0.10.0", "1.0.0"]
    falling = rising[::-1]
    assert sorted(falling, key=order) == rising
    assert order("1.0.0+build") == order("1.0.0")
    with pytest.raises(UserError, match="no semantic version"):
        order("1.0")


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_charts_of_this_checkout_have_the_versions_that_they_need(chart: Path) -> None:
    check_increment(ROOT, str(chart.relative_to(ROOT)))
