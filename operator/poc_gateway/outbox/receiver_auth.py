# SPDX-License-Identifier: Apache-2.0
"""Posts to receivers that ask for a user: with what the Secret of the round has, as it is now.

The database has the Secret's name alone. A Secret that cannot be had, or that the receiver does not take, is no
refusal: the post waits for its next try, with a reason that names the Secret.
"""

import logging
from dataclasses import replace

from poc_gateway import metrics
from poc_gateway.outbox.post import Answer, Outcome, Poster
from poc_operator.clients.kube.callback_secret import CallbackSecretReader, ReadSecret

_log = logging.getLogger(__name__)


class SecretPoster:
    """Posts with the Secrets of rounds, each of which it reads about once a minute while it is used.

    Without ``read`` no Secret can be read, as where there is no API server.
    """

    def __init__(self, poster: Poster, read: ReadSecret | None) -> None:
        self._poster = poster
        self._read = read
        self._readers: dict[tuple[str, str], CallbackSecretReader] = {}

    async def post(self, url: str, body: str, *, namespace: str | None, secret: str | None) -> Answer:
        """Post JSON once, or twice if the Secret has changed meanwhile. Every way to fail is an answer."""
        if namespace is None or secret is None:
            return await self._poster.post(url, body)
        if self._read is None:
            return _unavailable(f'Secret "{secret}" cannot be read: this gateway has no API server')
        return await self._post(url, body, self._reader(self._read, namespace, secret), secret)

    async def _post(self, url: str, body: str, reader: CallbackSecretReader, secret: str) -> Answer:
        auth = await reader.read()
        if isinstance(auth, str):
            return _unavailable(auth)
        answer = await self._poster.post(url, body, auth)
        if not answer.is_unauthorized:
            return answer
        changed = await reader.read(anew=True)
        if isinstance(changed, str):
            return _unavailable(changed)
        if changed != auth:
            answer = await self._poster.post(url, body, changed)
        return _named(answer, secret)

    def _reader(self, read: ReadSecret, namespace: str, secret: str) -> CallbackSecretReader:
        key = namespace, secret
        if key not in self._readers:
            self._readers[key] = CallbackSecretReader(read, namespace, secret, warn=_log.warning)
        return self._readers[key]


def _named(answer: Answer, secret: str) -> Answer:
    """Return the answer with a reason that says what to change."""
    if not answer.is_unauthorized:
        return answer
    reason = f'HTTP 401: the receiver does not take the user and the password of Secret "{secret}": correct the Secret'
    return replace(answer, reason=reason)


def _unavailable(reason: str) -> Answer:
    metrics.FAILURES.labels("secret").inc()
    return Answer(Outcome.FAILED, reason)
