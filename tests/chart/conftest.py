# SPDX-License-Identifier: Apache-2.0
"""helm, and the cluster that judges what it renders."""

import pytest

from hack.deploy.kube import Kube
from tests.support.servers.cluster import deployed


@pytest.fixture(scope="session")
def kube() -> Kube:
    return deployed()
