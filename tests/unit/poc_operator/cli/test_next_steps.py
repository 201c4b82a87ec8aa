# SPDX-License-Identifier: Apache-2.0
"""What to do about an error of a receiver: by what it answered."""

import re

import pytest

from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.cli.explanation import waiting_results
from poc_operator.cli.gateway_proxy import Forwarding, Place
from poc_operator.cli.next_steps import Names, receiver_remedy

AWAY = receiver_remedy("Cannot connect to host")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("HTTP 401: no", "Secret of callbackSecretRef"),
        ("HTTP 403: no", "Secret of callbackSecretRef"),
        ("HTTP 404: no", "new round with the right callbackURL"),
        ("HTTP 405: no", "new round with the right callbackURL"),
        ("HTTP 302: redirects are not followed", "to which the receiver redirects"),
        ("the receiver refuses everything, last with HTTP 400", "log"),
        ("HTTP 502: Bad Gateway", "log"),
        ("Cannot connect to host api:9100 [Name or service not known]", "use the IP address in the callback URL"),
        ("10.0.0.1 is not public: add its range to POC_GATEWAY_RECEIVER_PRIVATE", "gateway.receivers.private"),
    ],
)
def test_the_remedy_is_that_of_the_answer(error: str, words: str) -> None:
    assert words in receiver_remedy(error)


def test_each_answer_that_the_runbook_names_has_a_remedy_of_its_own() -> None:
    named = re.findall(r"`([^`]*HTTP \d+|certificate)`", EXPLANATIONS[Reason.RECEIVER_FAILING].remedy or "")
    assert len(named) == 5
    assert all(receiver_remedy(answer) != AWAY for answer in named)


@pytest.mark.parametrize(("seconds", "when"), [(41.2, " in 41 s."), (0.0, ".")])
def test_it_is_told_when_the_gateway_tries_again(seconds: float, when: str) -> None:
    told = Forwarding(
        place=Place(namespace="poc", name="gateway"), backlog=504, last_error="HTTP 502", next_try_seconds=seconds
    )
    (found,) = waiting_results(told, Names(namespace="poc", kind="pocround", name="r", fleet="", pod=""))
    assert found.meaning == f"504 results wait at the gateway, which tries again by itself{when}"
