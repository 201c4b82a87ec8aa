# SPDX-License-Identifier: Apache-2.0
"""The Secret that a round's ``callbackSecretRef`` names, read now and then: a changed one is told to the pods."""

from collections.abc import Callable

from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import StoreError, StoreForbidden
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.logs import ObjectLogger

#: Seconds after which a Secret that was read is read again, and after which one that could not be read is.
REFRESH_SECONDS = 60.0
RETRY_SECONDS = 10.0


class CallbackSecretObserver:
    """Reads the Secret of one round. ``clock`` returns seconds of any monotonic clock.

    While the API server fails, what was read last counts on. A Secret that is gone, forbidden or unfit does not.
    """

    def __init__(self, store: ObjectStore, namespace: str, log: ObjectLogger, clock: Callable[[], float]) -> None:
        self._store = store
        self._namespace = namespace
        self._log = log
        self._clock = clock
        self._due = float("-inf")
        self._found: BasicAuth | str | None = None

    async def observe(self, name: str) -> BasicAuth | str:
        """Return the user and the password, or why they cannot be had and what to do."""
        if self._found is None or self._clock() >= self._due:
            found = await self._read(name)
            if isinstance(found, str) and found != self._found:
                self._log.warning("%s", found)
            self._found = found
            self._due = self._clock() + (RETRY_SECONDS if isinstance(found, str) else REFRESH_SECONDS)
        return self._found

    async def _read(self, name: str) -> BasicAuth | str:
        secret = f'Secret "{name}" (spec.callbackSecretRef)'
        try:
            return await self._store.basic_auth(self._namespace, name)
        except LookupError:
            return f'{secret} does not exist in namespace "{self._namespace}": create it'
        except ValueError as error:
            return f"{secret} {error}"
        except StoreForbidden as error:
            return f"{secret} cannot be read ({error}): install the chart with rbac.readSecrets=true"
        except StoreError as error:
            if isinstance(self._found, BasicAuth):
                self._log.warning("%s cannot be read: %s; what was read before is used", secret, error)
                return self._found
            return f"{secret} cannot be read yet: {error}; it is read again in {RETRY_SECONDS:g} s"
