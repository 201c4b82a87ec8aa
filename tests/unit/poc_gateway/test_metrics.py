# SPDX-License-Identifier: Apache-2.0
"""The gateway's series are those of the documentation."""

import re

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from hack.images.site import ROOT
from poc_gateway import metrics
from poc_gateway.server.gauges import DatabaseGauges, JobGauges
from poc_gateway.store.database import Database

DOCUMENTED = re.compile(r"^\| `(poc_gateway_\w+)` \|", re.MULTILINE)


def test_every_series_is_documented_and_no_other(database: Database) -> None:
    registry = CollectorRegistry()
    for value in vars(metrics).values():
        if isinstance(value, MetricWrapperBase):
            registry.register(value)
    registry.register(DatabaseGauges(database))
    registry.register(JobGauges([]))
    # A counter's samples have a suffix that its family has not.
    names = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    documented = set(DOCUMENTED.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    of_a_volume = {name for name in documented if name.startswith("poc_gateway_volume_")}
    assert len(of_a_volume) == 2
    assert names == (documented if database.room.has_volume else documented - of_a_volume)
