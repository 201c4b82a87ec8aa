# SPDX-License-Identifier: Apache-2.0
"""How tools that follow kstatus (``kubectl apply --wait`` of kustomize, Argo CD, Flux) read an object of any kind.

The rules of sigs.k8s.io/cli-utils, package kstatus, for kinds that it does not know by name: deletion first, then the
generation, then the conditions ``Reconciling`` and ``Stalled``, then ``Ready``.
"""

from collections.abc import Mapping
from typing import Any, Literal

Reading = Literal["Terminating", "InProgress", "Failed", "Current"]


def kstatus(body: Mapping[str, Any]) -> Reading:
    """Return what an object in the API server's JSON is taken for."""
    metadata, status = body["metadata"], body.get("status", {})
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", ())}
    observed = status.get("observedGeneration")
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if observed is not None and observed != metadata.get("generation"):
        return "InProgress"
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"
