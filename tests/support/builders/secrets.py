# SPDX-License-Identifier: Apache-2.0
"""The gateway's secrets as tests set them, and the credentials of pods."""

import time
from typing import Any

import aiohttp

from poc_operator.credentials import Grant, sign
from vllm_poc.wire.callbacks import GATEWAY_USER

TOKEN = "token-of-people"  # noqa: S105 - guards nothing but tests
OPERATOR_TOKEN = "token-of-the-operator"  # noqa: S105
CALLBACK_KEY = "key-of-callbacks"
#: Settings of a gateway that asks for them.
SECRETS = {"token": TOKEN, "operator_token": OPERATOR_TOKEN, "callback_key": CALLBACK_KEY}
#: The same as environment variables.
ENVIRONMENT = {f"POC_GATEWAY_{name.upper()}": value for name, value in SECRETS.items()}
PEOPLE = {"Authorization": f"Bearer {TOKEN}"}
OPERATOR = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}


def a_grant(uid: str = "uid-1", slot: int = 0, pod: str = "a", **fields: Any) -> Grant:  # noqa: ANN401
    """What a pod that began a minute ago may deliver; its uid is its name with ``-uid`` behind it."""
    defaults = {"pod_uid": f"{pod}-uid", "start": 0, "since": int(time.time()) - 60, "rate": 1_000}
    return Grant(round=uid, slot=slot, pod=pod, **{**defaults, **fields})


def basic(password: str, user: str = GATEWAY_USER) -> dict[str, str]:
    """The header of a user and a password."""
    return {"Authorization": aiohttp.encode_basic_auth(user, password)}


def pod_headers(grant: Grant | None = None, *, key: str = CALLBACK_KEY, seconds: float = 3600) -> dict[str, str]:
    """The header of a pod whose credential is good for so many seconds from now."""
    return basic(sign(key, grant or a_grant(), int(time.time() + seconds)))
