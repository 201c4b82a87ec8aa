# SPDX-License-Identifier: Apache-2.0
"""Rounds on the cluster, as a user handles them: with kubectl."""

import json
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import SERVED_NAME
from hack.toolchain.common import UserError, wait_until
from poc_operator.apis.v1alpha1.meta import API_VERSION
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.cluster.gateway import wait_until_forwarded
from tests.support.servers.cluster import diagnosis

SECONDS = 60.0
LABEL = "poc-test"
#: A distance round of which roughly every second nonce is valid with the tiny model.
SPEC: dict[str, Any] = {
    "blockHash": "5f" * 32,
    "blockHeight": 1234567,
    "publicKey": "02a1b2c3d4",
    "nodes": {"first": 0, "last": 0, "count": 1},
    "rTarget": "1.416",
    "model": {"name": SERVED_NAME, "seqLen": 64},
    "batchSize": 8,
}
ARTIFACT: dict[str, Any] = {"rTarget": None, "artifact": {"kDim": 12}}


def manifest(name: str, **spec: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a round whose spec is SPEC changed by ``spec``; None takes a field away."""
    fields = {field: value for field, value in {**SPEC, **spec}.items() if value is not None}
    metadata = {"name": name, "labels": {LABEL: "true"}}
    return {"apiVersion": API_VERSION, "kind": PoCRound.KIND.kind, "metadata": metadata, "spec": fields}


class Rounds:
    """The rounds of one test in one namespace; on leaving, they are deleted and their pods stopped."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace

    def __enter__(self) -> Self:
        self._delete_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._delete_all()

    def apply(self, name: str, **spec: Any) -> None:  # noqa: ANN401
        """Create a round; see ``manifest``."""
        self._kubectl("apply", "-f", "-", stdin=json.dumps(manifest(name, **spec)))

    def patch(self, name: str, **spec: Any) -> None:  # noqa: ANN401
        """Change fields of the spec."""
        self._kubectl("patch", "pocround", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self, name: str) -> None:
        """Delete a round and wait until it is gone; fails after a minute."""
        self._kubectl("delete", "pocround", name, f"--timeout={SECONDS:.0f}s", limit=SECONDS + 10)

    def get(self, name: str) -> PoCRound:
        """Return the round as it is now."""
        return PoCRound.parse(self._kube.get("--namespace", self._namespace, "pocround", name))

    def settled(self, name: str) -> PoCRound:
        """Return a round that has stopped, once its receiver has everything that the gateway stored."""
        wait_until_forwarded(self._kube, name)
        return self.get(name)

    def wait(self, name: str, what: str, seconds: float = SECONDS) -> None:
        """``kubectl wait``; ``what`` is the value of ``--for``."""
        try:
            self._kubectl("wait", "pocround", name, f"--for={what}", f"--timeout={seconds:.0f}s", limit=seconds + 10)
        except UserError as error:
            pytest.fail(f"{error}\n{diagnosis(self._kube)}")

    def wait_for_reason(self, name: str, condition: str, reason: str) -> str:
        """Wait until a condition has this reason; return its message."""
        self.wait(name, f'jsonpath={{.status.conditions[?(@.type=="{condition}")].reason}}={reason}')
        return next(found.message for found in self.get(name).status.conditions if found.type == condition)

    def wait_until(self, name: str, holds: Callable[[PoCRound], bool], seconds: float = SECONDS) -> PoCRound:
        """Wait until something holds for the round; return the round."""
        last = [self.get(name)]

        def look() -> bool:
            last[0] = self.get(name)
            return holds(last[0])

        if not wait_until(look, seconds, pause=0.5):
            pytest.fail(f"not seen within {seconds:.0f} s; last: {last[0]}\n{diagnosis(self._kube)}")
        return last[0]

    def run_to_the_end(self, name: str, **spec: Any) -> PoCRound:  # noqa: ANN401
        """Create a round, wait until it is complete, and return it."""
        self.apply(name, **spec)
        self.wait(name, "condition=Complete")
        return self.get(name)

    def _delete_all(self) -> None:
        self._kubectl("delete", "pocrounds", "--selector", LABEL, "--ignore-not-found", limit=150)

    def _kubectl(self, *arguments: str, stdin: str | None = None, limit: float = SECONDS) -> str:
        return self._kube.kubectl("--namespace", self._namespace, *arguments, stdin=stdin, limit=limit)


def is_running(round_: PoCRound) -> bool:
    """Whether every slot of the round has a pod that has delivered something."""
    slots = round_.status.assignments
    return bool(slots) and all(slot.session and slot.delivered for slot in slots)


def hold(seconds: float, still: Callable[[], bool]) -> bool:
    """Whether something stays true for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not still():
            return False
        time.sleep(0.2)
    return True
