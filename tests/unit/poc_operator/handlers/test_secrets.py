# SPDX-License-Identifier: Apache-2.0
"""The operator uses the first of its secrets, and says which one is empty."""

import kopf
import pytest
from yarl import URL

from poc_operator.credentials import Verifier
from poc_operator.handlers import process
from tests.support.builders.secrets import a_grant


async def test_the_first_of_several_secrets_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_GATEWAY_OPERATOR_TOKEN", "new-token,old-token")
    monkeypatch.setenv("POC_GATEWAY_CALLBACK_KEY", "new-key, old-key")
    granted = a_grant()
    client = process._gateway("http://gateway:8080")
    assert client is not None
    async with client:
        assert client._session.headers["Authorization"] == "Bearer new-token"
        url = URL(client.signed(client.callback_url("ns", "r", "uid-1"), granted))
    assert Verifier(["new-key"]).verify(url.password or "", 0) == granted


@pytest.mark.parametrize("name", ["POC_GATEWAY_OPERATOR_TOKEN", "POC_GATEWAY_CALLBACK_KEY"])
async def test_an_empty_secret_ends_the_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, " ,")
    with pytest.raises(kopf.PermanentError, match=f"{name} is empty: set one secret"):
        process._gateway("http://gateway:8080")


def test_without_a_gateway_there_are_none() -> None:
    assert process._gateway(None) is None
