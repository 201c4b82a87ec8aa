# SPDX-License-Identifier: Apache-2.0
"""Rounds, validations and calibrations on the cluster, as a user handles them: with kubectl."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar, cast

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import SERVED_NAME
from hack.toolchain.common import UserError, wait_until
from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.meta import API_VERSION
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation
from tests.cluster.gateway import wait_until_forwarded
from tests.support.patience import PATIENCE
from tests.support.servers.cluster import diagnosis

WorkT = TypeVar("WorkT", bound=PoCRound | PoCValidation | PoCCalibration)

SECONDS = 60.0
LABEL = "poc-test"
#: What every object says of the block and the pods.
BLOCK: dict[str, Any] = {
    "blockHash": "5f" * 32,
    "blockHeight": 1234567,
    "publicKey": "02a1b2c3d4",
    "model": {"name": SERVED_NAME, "seqLen": 64},
    "batchSize": 8,
}
#: A distance round of which roughly every second nonce is valid with the tiny model.
SPEC: dict[str, Any] = {**BLOCK, "nodes": {"first": 0, "last": 0, "count": 1}, "rTarget": "1.416"}
ARTIFACT: dict[str, Any] = {"rTarget": None, "artifact": {"kDim": 12}}


class Objects(Generic[WorkT]):
    """The objects of one kind that a test makes in a namespace; on leaving, they are deleted and their pods stopped.

    ``spec`` is that of an object unless a test says otherwise.
    """

    def __init__(self, kube: Kube, namespace: str, kind: type[WorkT], spec: Mapping[str, Any]) -> None:
        self._kube = kube
        self._namespace = namespace
        self._kind = kind
        self._name = kind.KIND.singular
        self._spec = spec

    def __enter__(self) -> Self:
        self._delete_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._delete_all()

    def manifest(self, name: str, **spec: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return an object whose spec is changed by ``spec``; None takes a field away."""
        fields = {field: value for field, value in {**self._spec, **spec}.items() if value is not None}
        metadata = {"name": name, "labels": {LABEL: "true"}}
        return {"apiVersion": API_VERSION, "kind": self._kind.KIND.kind, "metadata": metadata, "spec": fields}

    def apply(self, name: str, **spec: Any) -> None:  # noqa: ANN401
        """Create an object; see `manifest`."""
        self._kubectl("apply", "-f", "-", stdin=json.dumps(self.manifest(name, **spec)))

    def patch(self, name: str, **spec: Any) -> None:  # noqa: ANN401
        """Change fields of the spec."""
        self._kubectl("patch", self._name, name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self, name: str) -> None:
        """Delete an object and wait until it is gone; fails after `SECONDS`."""
        self._kubectl("delete", self._name, name, f"--timeout={PATIENCE * SECONDS:.0f}s", limit=SECONDS + 10)

    def get(self, name: str) -> WorkT:
        """Return the object as it is now."""
        body = self._kube.get("--namespace", self._namespace, self._name, name)
        return cast("WorkT", self._kind.parse(body))

    def settled(self, name: str) -> WorkT:
        """Return a round that has stopped, once its receiver has everything that the gateway stored."""
        wait_until_forwarded(self._kube, name)
        return self.get(name)

    def wait(self, name: str, what: str, seconds: float = SECONDS) -> None:
        """``kubectl wait``; ``what`` is the value of ``--for``."""
        limit = f"--timeout={PATIENCE * seconds:.0f}s"
        try:
            self._kubectl("wait", self._name, name, f"--for={what}", limit, limit=seconds + 10)
        except UserError as error:
            pytest.fail(f"{error}\n{diagnosis(self._kube)}")

    def wait_for_reason(self, name: str, condition: str, reason: str) -> str:
        """Wait until a condition has this reason; return its message."""
        self.wait(name, f'jsonpath={{.status.conditions[?(@.type=="{condition}")].reason}}={reason}')
        return next(found.message for found in self.get(name).status.own_conditions if found.type == condition)

    def wait_until(self, name: str, holds: Callable[[WorkT], bool], seconds: float = SECONDS) -> WorkT:
        """Wait until something holds for the object; return it."""
        last = [self.get(name)]

        def look() -> bool:
            last[0] = self.get(name)
            return holds(last[0])

        if not wait_until(look, PATIENCE * seconds, pause=0.5):
            pytest.fail(f"not seen within {PATIENCE * seconds:.0f} s; last: {last[0]}\n{diagnosis(self._kube)}")
        return last[0]

    def run_to_the_end(self, name: str, **spec: Any) -> WorkT:  # noqa: ANN401
        """Create an object, wait until it is complete, and return it."""
        self.apply(name, **spec)
        self.wait(name, "condition=Complete")
        return self.get(name)

    def _delete_all(self) -> None:
        self._kubectl("delete", self._name, "--selector", LABEL, "--ignore-not-found", limit=150)

    def _kubectl(self, *arguments: str, stdin: str | None = None, limit: float = SECONDS) -> str:
        return self._kube.kubectl("--namespace", self._namespace, *arguments, stdin=stdin, limit=PATIENCE * limit)


class Rounds(Objects[PoCRound]):
    """The rounds of one test."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        super().__init__(kube, namespace, PoCRound, SPEC)


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
