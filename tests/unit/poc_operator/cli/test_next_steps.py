# SPDX-License-Identifier: Apache-2.0
"""What to do about an error of a receiver: by what it answered."""

import re

import pytest

from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.cli.next_steps import receiver_remedy

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
        ("10.0.0.1 is not public: add its range to POC_GATEWAY_RECEIVER_PRIVATE", "gateway.receivers.private"),
    ],
)
def test_the_remedy_is_that_of_the_answer(error: str, words: str) -> None:
    assert words in receiver_remedy(error)


def test_each_answer_that_the_runbook_names_has_a_remedy_of_its_own() -> None:
    named = re.findall(r"`([^`]*HTTP \d+|certificate)`", EXPLANATIONS[Reason.RECEIVER_FAILING].remedy or "")
    assert len(named) == 5
    assert all(receiver_remedy(answer) != AWAY for answer in named)
