# SPDX-License-Identifier: Apache-2.0
"""`helm test` passes on the cluster for each chart that has a test, and leaves nothing behind."""

from pathlib import Path

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import OPERATOR, SYSTEM_NAMESPACE
from hack.images.site import ROOT
from hack.toolchain.common import run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

#: The release of each chart that has a test.
RELEASES = {OPERATOR_CHART: OPERATOR}


def test_no_chart_with_a_test_is_left_out() -> None:
    assert {path.parents[1] for path in (ROOT / "charts").glob("*/templates/tests")} == set(RELEASES)


@pytest.mark.parametrize("release", RELEASES.values())
def test_the_release_passes(kube: Kube, release: str) -> None:
    argv: list[str | Path] = [kube.helm_path, "test", release, "--namespace", SYSTEM_NAMESPACE, "--timeout", "90s"]
    said = run(argv, limit=100, env=kube.environment)
    assert "Phase:          Succeeded" in said
    assert f"TEST SUITE:     {release}-test" in said
    kinds = "pods,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings"
    names = kube.kubectl("get", kinds, "--namespace", SYSTEM_NAMESPACE, "-o", "name").splitlines()
    assert [name for name in names if name.startswith("clusterrole.") and release in name]
    assert [name for name in names if f"{release}-test" in name] == []
