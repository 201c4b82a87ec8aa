# SPDX-License-Identifier: Apache-2.0
"""Asks a fleet's pods for their self-checks, each beside everything else: one that hangs holds up no other.

What a pod answered is kept until it is gone: pods are compared with each other, and their vectors stand in no status.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import TypeVar

from poc_operator.apis.v1alpha1.fleet_upkeep import Fingerprint
from poc_operator.clients.errors import PodError
from poc_operator.clients.pods.client import ClientOf, PodClient, base_url
from poc_operator.controller.health import supervised
from poc_operator.controller.logs import ObjectLogger
from poc_operator.fleets.checked_pods import CheckAnswer, CheckPod
from vllm_poc.wire.answers import GpusResponse, ModelLimits, PowState, StatusResponse

#: Pods of all fleets that are asked at once, and of one fleet: with fewer than the client's connections, what other
#: objects ask is not held up, and with fewer still no fleet holds up the others.
CHECKS = 256
FLEET_CHECKS = 64
#: Seconds until a pod that did not answer is asked again, each time twice as many.
FIRST_PAUSE_SECONDS = 1.0
MOST_PAUSE_SECONDS = 60.0
#: So much of what a pod tells of its server is kept in each field.
_MOST_TEXT = 160

_Key = tuple[str, str, str]  # uid of the pod, its server, name of the check
_T = TypeVar("_T")


class _CannotBeCheckedError(Exception):
    """What answered cannot be checked; the text says why."""


class SelfChecks:
    """The checks of one fleet. ``wake`` is set by news, and ``shared`` bounds those of all fleets.

    While ``may_act`` says no, no pod is asked.
    """

    def __init__(
        self,
        clients: ClientOf,
        *,
        wake: asyncio.Event,
        shared: asyncio.Semaphore,
        may_act: Callable[[], bool],
        log: ObjectLogger,
    ) -> None:
        self._clients = clients
        self._wake = wake
        self._shared = shared
        self._own = asyncio.Semaphore(FLEET_CHECKS)
        self._may_act = may_act
        self._log = log
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._answers: dict[str, CheckAnswer] = {}

    @property
    def answers(self) -> Mapping[str, CheckAnswer]:
        """What pods have answered last, by their uids."""
        return dict(self._answers)

    def keep(self, checks: Iterable[CheckPod], uids: Collection[str]) -> None:
        """Ask these pods until they have answered, give up all other checks, and forget all pods but ``uids``.

        One that has answered since the plan was made is not asked anew.
        """
        wanted = {(one.pod.uid, one.server, one.check.name): one for one in checks}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        for key in wanted.keys() - self._tasks.keys():
            self._tasks[key] = supervised(f"the self-check of pod {key[0]}", self._ask(wanted[key]), forever=False)
        self._answers = {uid: answer for uid, answer in self._answers.items() if uid in uids}

    async def cancel(self) -> None:
        """Give up all checks; pods drop the work."""
        tasks = list(self._tasks.values())
        self.keep((), ())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, ask: CheckPod) -> None:
        """Ask one pod until it has answered."""
        pause = FIRST_PAUSE_SECONDS
        while not await self._try(ask):
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)

    async def _try(self, ask: CheckPod) -> bool:
        """Ask one pod once; return whether it has answered."""
        try:
            async with self._own, self._shared:
                if not self._may_act():
                    return False
                self._put(ask, await self._answer(ask))
        except (PodError, _CannotBeCheckedError, ValueError) as error:
            why = str(error)
        except Exception as error:  # what one pod says ends no process
            self._log.log(logging.ERROR, "the self-check of pod %s: %r", ask.pod.name, error)
            why = f"{type(error).__name__}: {error}"
        else:
            return True
        known = self._answers.get(ask.pod.uid)
        if known is None or known.error != why:
            self._log.log(logging.WARNING, "the self-check of pod %s: %s; it is asked again", ask.pod.name, why)
        if known is None or known.vectors is None or (known.server, known.check) != (ask.server, ask.check.name):
            self._put(ask, CheckAnswer(server=ask.server, check=ask.check.name, time=_now(), error=why))
        return False

    def _put(self, ask: CheckPod, answer: CheckAnswer) -> None:
        known = self._answers.get(ask.pod.uid)
        self._answers[ask.pod.uid] = answer
        if answer.vectors is not None or known is None or known.error != answer.error:
            self._wake.set()

    async def _answer(self, ask: CheckPod) -> CheckAnswer:
        pod, check = ask.pod, ask.check
        client, base = await self._clients.of(pod.namespace), base_url(pod.ip or "", ask.port)
        status = await client.status(base)
        if not isinstance(status, StatusResponse):
            raise _CannotBeCheckedError(
                "its server is not that of this project, and cannot be asked for named nonces as ours are: "
                "set selfCheck.enabled to false"
            )
        model = status.model
        if model.error is not None or not model.names:
            raise _CannotBeCheckedError(model.error or "its server does not say yet what it serves")
        generates = status.state is PowState.GENERATING
        result = await client.generate(base, check.request(model.names[0], beside_round=generates))
        vectors = check.vectors(result)
        fingerprint = await _fingerprint(client, base, model, check.batch(model))
        return CheckAnswer(server=ask.server, check=check.name, time=_now(), vectors=vectors, fingerprint=fingerprint)


def _now() -> datetime:
    # As exact as the times of plans.
    return datetime.now(UTC).replace(microsecond=0)


async def _fingerprint(client: PodClient, base: str, model: ModelLimits, batch: int) -> Fingerprint:
    """Return what a pod's results depend on, as far as it tells, and its ``batch``, 0 if it does not tell that."""
    gpus, versions = await asyncio.gather(client.gpus(base), client.versions(base), return_exceptions=True)
    told = _unless_failed(gpus) or GpusResponse()
    names = sorted({gpu.name for gpu in told.devices if gpu.name})
    found = _unless_failed(versions)
    return Fingerprint(
        gpu=_text(f"{len(told.devices)} × {', '.join(names)}" if names else ""),  # noqa: RUF001 - as people write it
        driver=_text(told.driver_version or ""),
        vllm=_text(found.vllm_version if found is not None else ""),
        attention=_text(model.attention),
        experts=_text(model.experts),
        flags=_text(" ".join(model.flags)),
        batch=f"{batch} nonces" if batch else "",
        details=_text(_details(model)),
    )


def _details(model: ModelLimits) -> str:
    told = {"dtype": model.dtype, "KV cache": model.kv_cache_dtype, "quantization": model.quantization}
    words = [f"{name} {word}" for name, word in told.items() if word]
    return ", ".join([*words, "PoC's own forward pass" if model.fused else "vLLM's forward pass"])


def _unless_failed(answer: _T | BaseException) -> _T | None:
    """Return the answer; None if the pod gave none. Other exceptions are raised."""
    if isinstance(answer, BaseException):
        if not isinstance(answer, PodError):
            raise answer
        return None
    return answer


def _text(text: str) -> str:
    return text[:_MOST_TEXT]
