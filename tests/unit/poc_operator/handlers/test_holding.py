# SPDX-License-Identifier: Apache-2.0
"""What the start makes of the command line, and which deleted objects the finalizer holds: none where the operator's
rights may go before it, as with a namespace."""

from types import SimpleNamespace
from typing import Any

import kopf
import pytest

from poc_operator.apis.v1alpha1.status import State
from poc_operator.controller.fleet_surroundings import FleetOptions
from poc_operator.controller.manager import Manager
from poc_operator.handlers import process
from poc_operator.handlers.objects import _is_held

#: What the start takes from the command line, beside the namespaces.
OPTIONS: dict[str, Any] = {
    "gateway_url": None,
    "lease_namespace": None,
    "identity": None,
    "pod_token_secret": "t",
    "max_nonces_per_second": 1,
    "pod_lease_seconds": 60,
    "worker_image": None,
}


class Created(Exception):  # noqa: N818 - an end of the start, and no error
    """A manager would be made now."""


@pytest.mark.parametrize(("namespaces", "holds"), [([], True), (["a", "b"], False)], ids=["cluster", "roles"])
async def test_with_rights_in_namespaces_alone_nothing_is_held(
    namespaces: list[str], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(*_: Any, holds_deleted: bool, **__: Any) -> None:  # noqa: ANN401
        raise Created(holds_deleted)

    monkeypatch.setattr(Manager, "create", create)
    start: Any = process.start
    memo = kopf.Memo(options=SimpleNamespace(namespace=namespaces, **OPTIONS))
    with pytest.raises(Created) as found:
        await start(settings=kopf.OperatorSettings(), memo=memo)
    assert found.value.args == (holds,)


@pytest.mark.parametrize(
    ("url", "host"),
    [(None, None), ("http://gateway.poc.svc:8080", "gateway.poc.svc"), ("http://[fd00::7]:1", "fd00::7")],
)
async def test_pods_of_fleets_deliver_to_the_host_of_the_gateway(
    url: str | None, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(*_: Any, fleet_options: FleetOptions, **__: Any) -> None:  # noqa: ANN401
        raise Created(fleet_options.gateway_host)

    for name in ("POC_GATEWAY_OPERATOR_TOKEN", "POC_GATEWAY_CALLBACK_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(Manager, "create", create)
    start: Any = process.start
    memo = kopf.Memo(options=SimpleNamespace(namespace=[], **OPTIONS | {"gateway_url": url}))
    with pytest.raises(Created) as found:
        await start(settings=kopf.OperatorSettings(), memo=memo)
    assert found.value.args == (host,)


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("state", State)
def test_what_may_have_pods_at_work_is_held(state: State, holds: bool) -> None:
    memo = kopf.Memo(manager=SimpleNamespace(holds_deleted=holds))
    works = not state.finished and state is not State.SUSPENDED
    status: Any = {"state": state.value}
    assert _is_held(status=status, memo=memo) is (holds and works)
