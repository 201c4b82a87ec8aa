# SPDX-License-Identifier: Apache-2.0
"""The Secret that a round's ``callbackSecretRef`` names, read now and then. Operator and gateway say the same of it."""

import time
from collections.abc import Awaitable, Callable

from poc_operator.basic_auth import BasicAuth
from poc_operator.clients.errors import StoreError, StoreForbidden

#: Seconds after which a Secret that was read is read again, and after which one that could not be read is.
REFRESH_SECONDS = 60.0
RETRY_SECONDS = 10.0

#: Reads a Secret by namespace and name, as `ObjectStore.basic_auth` does.
ReadSecret = Callable[[str, str], Awaitable[BasicAuth]]


class CallbackSecretReader:
    """Reads one Secret. ``warn`` is told once why it cannot be had. ``clock`` returns seconds of a monotonic clock.

    While the API server fails, what was read last counts on. A Secret that is gone, forbidden or unfit does not.
    """

    def __init__(
        self,
        read: ReadSecret,
        namespace: str,
        name: str,
        *,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_secret = read
        self._namespace = namespace
        self._name = name
        self._warn = warn
        self._clock = clock
        self._due = float("-inf")
        self._found: BasicAuth | str | None = None

    async def read(self, *, anew: bool = False) -> BasicAuth | str:
        """Return the user and the password, or why they cannot be had and what to do; ``anew``, though it is fresh."""
        if self._found is None or anew or self._clock() >= self._due:
            found = await self._read()
            if isinstance(found, str) and found != self._found:
                self._warn(found)
            self._found = found
            self._due = self._clock() + (RETRY_SECONDS if isinstance(found, str) else REFRESH_SECONDS)
        return self._found

    async def _read(self) -> BasicAuth | str:
        secret = f'Secret "{self._name}" (spec.callbackSecretRef)'
        try:
            return await self._read_secret(self._namespace, self._name)
        except LookupError:
            return f'{secret} does not exist in namespace "{self._namespace}": create it'
        except ValueError as error:
            return f"{secret} {error}"
        except StoreForbidden as error:
            return f"{secret} cannot be read ({error}): install the chart with rbac.readSecrets=true"
        except StoreError as error:
            if isinstance(self._found, BasicAuth):
                self._warn(f"{secret} cannot be read: {error}; what was read before is used")
                return self._found
            return f"{secret} cannot be read yet: {error}; it is read again in {RETRY_SECONDS:g} s"
