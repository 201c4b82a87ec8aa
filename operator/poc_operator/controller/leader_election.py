# SPDX-License-Identifier: Apache-2.0
"""The Lease that lets one operator act at a time; docs/develop/decisions says why it is ours and what it cannot do."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from kubernetes.aio import client

from poc_operator.apis.v1alpha1.meta import COMPONENT
from poc_operator.clients.errors import StaleObject, StoreError
from poc_operator.clients.kube.connection import api_errors

log = logging.getLogger(__name__)

#: Seconds after which a lease that is not renewed may be taken by another operator.
DURATION_SECONDS = 15

#: Seconds after which the holder stops acting if it cannot renew: well before another may take over.
RENEW_SECONDS = 10.0

#: Seconds between two tries to get or to renew it.
RETRY_SECONDS = 2.0


class LeaderElection:
    """The Lease in ``namespace``, for the process ``identity``. ``clock`` returns seconds of a monotonic clock.

    ``api`` should be for this alone: a request that waits for a connection is a renewal that comes late.
    """

    def __init__(self, api: client.ApiClient, namespace: str, identity: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._leases = client.CoordinationV1Api(api)
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._renewed = float("-inf")
        # The holder's last sign of life, and when it was seen: clocks of different machines are not compared.
        self._seen: tuple[object, float] = (None, 0.0)
        self.holder: str | None = None
        #: UID of the Lease, once it was seen.
        self.uid: str | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    @property
    def held(self) -> bool:
        """Whether this process may act."""
        return self._clock() - self._renewed < RENEW_SECONDS

    @property
    def taken(self) -> bool:
        """Whether another process held the lease when it was seen last."""
        return self.holder not in (None, "", self._identity)

    @property
    def overdue(self) -> bool:
        """Whether this process has acted, and may not any more. One that waits for its turn has not."""
        return self._renewed != float("-inf") and not self.held

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        while not await self._renew():
            log.warning("waiting for the lease %s/%s, held by %s", self._namespace, COMPONENT, self.holder)
            await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Renew the lease until it is lost."""
        while self.held:
            await asyncio.sleep(RETRY_SECONDS)
            if not await self._renew() and self.holder != self._identity:
                self._renewed = float("-inf")

    async def release(self) -> None:
        """Let another operator have the lease at once."""
        lease = await self._read() if self.held else None
        self._renewed = float("-inf")
        if lease is not None and lease.spec is not None and lease.spec.holder_identity == self._identity:
            lease.spec.holder_identity = None
            await self._write(lease)

    async def _renew(self) -> bool:
        """Get or renew the lease; False if that failed or another holds it."""
        began = self._clock()
        try:
            async with asyncio.timeout(RENEW_SECONDS / 2):
                renewed = await self._try()
        except StaleObject:
            return False  # somebody else was faster
        except (StoreError, TimeoutError) as error:
            log.warning("lease %s/%s: %s", self._namespace, COMPONENT, str(error) or "no answer in time")
            return False
        if renewed:
            self._renewed = began
        return renewed

    async def _try(self) -> bool:
        lease = await self._read()
        if lease is None:
            await self._create()
            return True
        self._note(lease)
        lease.spec = spec = lease.spec or client.V1LeaseSpec()
        self.holder = spec.holder_identity
        if self.taken and not self._is_over(spec):
            return False
        if self.holder != self._identity:
            spec.acquire_time, spec.lease_transitions = datetime.now(UTC), (spec.lease_transitions or 0) + 1
        spec.holder_identity, spec.lease_duration_seconds = self._identity, DURATION_SECONDS
        spec.renew_time = datetime.now(UTC)
        await self._write(lease)
        self.holder = self._identity
        return True

    def _note(self, lease: client.V1Lease) -> None:
        self.uid = lease.metadata.uid if lease.metadata is not None else None

    def _is_over(self, spec: client.V1LeaseSpec) -> bool:
        """Whether the holder has shown no sign of life for as long as its lease lasts."""
        sign = (spec.holder_identity, spec.renew_time)
        if sign != self._seen[0]:
            self._seen = (sign, self._clock())
        return self._clock() - self._seen[1] >= (spec.lease_duration_seconds or DURATION_SECONDS)

    async def _read(self) -> client.V1Lease | None:
        async with api_errors():
            return await self._leases.read_namespaced_lease(COMPONENT, self._namespace)
        return None

    async def _create(self) -> None:
        now = datetime.now(UTC)
        spec = client.V1LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=DURATION_SECONDS,
            acquire_time=now,
            renew_time=now,
            lease_transitions=0,
        )
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=COMPONENT), spec=spec)
        async with api_errors():
            self._note(await self._leases.create_namespaced_lease(self._namespace, lease))
        self.holder = self._identity

    async def _write(self, lease: client.V1Lease) -> None:
        """Write the lease as it was read; StaleObject if somebody wrote it meanwhile."""
        async with api_errors():
            await self._leases.replace_namespaced_lease(COMPONENT, self._namespace, lease)


class LeaseReader:
    """Reads the Lease without taking part. ``clock`` returns seconds of a monotonic clock."""

    def __init__(self, api: client.ApiClient, namespace: str, clock: Callable[[], float]) -> None:
        self._leases = client.CoordinationV1Api(api)
        self._namespace = namespace
        self._clock = clock
        self._dead: object = None  # the last sign of life of a holder that was found to be gone

    async def living_holder(self, *, but: Callable[[str], Awaitable[bool]]) -> str | None:
        """Return who holds the Lease and renews it, unless it is one of these; None if there is nobody.

        A holder is watched for as long as its lease lasts, and a little longer: whoever waits takes it over then.
        """
        seen, since = await self._sign(), self._clock()
        while seen != self._dead:
            if seen[0] is not None and await but(seen[0]):
                return None
            if self._clock() - since >= _takeover_seconds(seen[0]):
                self._dead = seen
                break
            await asyncio.sleep(RETRY_SECONDS)
            sign = await self._sign()
            if sign == seen:
                continue
            if sign[0] is not None and not await but(sign[0]):
                return sign[0]
            seen, since = sign, self._clock()
        return None

    async def _sign(self) -> tuple[str | None, object]:
        """Return the holder and when it renewed the Lease."""
        async with api_errors():
            lease = await self._leases.read_namespaced_lease(COMPONENT, self._namespace)
            spec = lease.spec or client.V1LeaseSpec()
            return spec.holder_identity or None, spec.renew_time
        return None, None


def _takeover_seconds(holder: str | None) -> float:
    """Return after how long who waits for the Lease has it, if its holder is gone."""
    return 2 * RETRY_SECONDS + (DURATION_SECONDS if holder is not None else 0)
