# SPDX-License-Identifier: Apache-2.0
"""Pods: watched read-only; nothing is ever written to them."""

import kopf

from poc_operator.model.pods import PodView
from poc_operator.runtime.operator import Operator


@kopf.on.event("v1", "pods")
async def pod_event(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: object) -> None:  # noqa: A002 - kopf's name
    """Pass every change of a pod on to the rounds."""
    operator: Operator = memo.operator
    pod = PodView.parse(body)
    if type == "DELETED":
        operator.pod_deleted(pod)
    else:
        operator.pod_changed(pod)
