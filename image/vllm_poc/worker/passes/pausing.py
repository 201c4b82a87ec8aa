# SPDX-License-Identifier: Apache-2.0
"""A forward pass that pauses behind layers, so that chat runs in the middle of it.

vLLM's models run all of their layers in one call. That call has a thread of its own here, which waits between layers.
All else that the pass depends on is shared with chat: patches, hooks, caches and what attention is told. The caller
puts these in place for as long as the pass runs, and takes them away while it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vllm_poc.worker.model.adapter import ModelAdapter, StageInputs, model_inputs

if TYPE_CHECKING:
    from torch import nn
    from vllm.forward_context import ForwardContext

    from vllm_poc.worker.model.adapter import AttentionPlan


#: A pass that is dropped may be in the middle of a layer, or for ever within a collective whose other ranks have ended.
_STOP_SECONDS = 30.0


class _StoppedError(BaseException):
    """Ends a pass that nobody goes on with; the model must not catch it."""


class _ThreadState(NamedTuple):
    """What PyTorch keeps for each thread: the current stream, and how many threads of the CPU compute."""

    stream: torch.cuda.Stream | None
    threads: int

    @classmethod
    def current(cls, device: torch.device) -> _ThreadState:
        """Return that of the calling thread."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None, torch.get_num_threads())

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Make it that of the calling thread while the context lasts."""
        if self.stream is None:
            torch.set_num_threads(self.threads)
            yield
            return
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            # CUDA's context becomes the thread's with PyTorch's first operation. Other libraries' need one before.
            torch.zeros(1, device=self.stream.device)
            yield


class PausingPass:
    """One forward pass of a model of a single stage on ``inputs``, which it overwrites."""

    def __init__(self, adapter: ModelAdapter, inputs: StageInputs) -> None:
        self._adapter = adapter
        self._inputs = inputs
        self._context: ForwardContext | None = None
        self._thread: threading.Thread | None = None
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._stopped = False
        self._output: Tensor | None = None
        self._error: BaseException | None = None

    def run(self, plan: AttentionPlan, until: nn.Module | None = None) -> Tensor | None:
        """Go on until behind a layer, and return None there; without one to the end.

        Returns the output of the final norm ``[tokens, hidden]`` then. Raises what the model raises.
        """
        adapter = self._adapter
        inputs = model_inputs(adapter.model, self._inputs)
        with adapter.computing(plan, self._context) as self._context, inputs as given:
            arguments = {"positions": plan.positions, "intermediate_tensors": None, **given}
            if until is None and self._thread is None:
                return self._computed(arguments)  # needs no thread
            hook = until.register_forward_hook(self._pause) if until is not None else None
            try:
                self._go_on(arguments)
            finally:
                if hook is not None:
                    hook.remove()
        self._raise_what_went_wrong()
        if until is not None and self._output is not None:
            raise RuntimeError("a forward pass has ended before a layer that it should have come to")
        return self._output

    def stop(self) -> None:
        """Drop the pass. Nothing happens if it has not begun, or has ended."""
        self._stopped = True
        if self._thread is not None and self._thread.is_alive():
            self._resumed.release()
            self._thread.join(_STOP_SECONDS)

    def _raise_what_went_wrong(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback has this frame, and all that the model held

    def _go_on(self, arguments: Mapping[str, object]) -> None:
        if self._thread is None:
            run = partial(copy_context().run, self._run, arguments, _ThreadState.current(self._adapter.device))
            self._thread = threading.Thread(target=run, name="poc-forward-pass", daemon=True)
            self._thread.start()
        else:
            self._resumed.release()
        self._paused.acquire()
        if self._output is not None or self._error is not None:
            self._thread.join()

    def _run(self, arguments: Mapping[str, object], state: _ThreadState) -> None:
        try:
            with torch.inference_mode(), state.taken_over():
                self._output = self._computed(arguments)
        except _StoppedError:
            pass
        except BaseException as error:  # for the caller's thread
            self._error = error
        finally:
            self._paused.release()

    def _computed(self, arguments: Mapping[str, object]) -> Tensor:
        output = self._adapter.model(**arguments)
        assert isinstance(output, Tensor)  # noqa: S101 - there is a single stage
        return output

    def _pause(self, *_: object) -> None:
        if threading.current_thread() is not self._thread:
            return
        self._paused.release()
        self._resumed.acquire()
        if self._stopped:
            raise _StoppedError


def ends(layers: Sequence[nn.Module], parts: int) -> list[nn.Module | None]:
    """Return the layers behind which each of so many parts of a pass ends; None for the last, and at least one."""
    parts = max(1, min(parts, len(layers)))
    return [*(layers[part * len(layers) // parts - 1] for part in range(1, parts)), None]
