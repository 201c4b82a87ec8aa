# SPDX-License-Identifier: Apache-2.0
"""What a pod does while it is Loading, by the end of vLLM's log. Pure: who reads the log is elsewhere.

The kubelet does not tell reading weights from compiling, and the operator may not read logs. vLLM has no other place
where it says how far its start is. Its words change from release to release: tests/vllm reads them of real servers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.schema import ApiModel
from poc_operator.apis.v1alpha1.work import DEFAULT_PORT
from poc_operator.fleets.render import CONTAINER
from poc_operator.observed import PodView

FETCHING, DOWNLOADING, READING = "fetching weights", "downloading weights", "reading weights"
PREPARING, COMPILING, MEASURING = "preparing weights", "compiling", "measuring memory"
WARMING, CAPTURING = "warming up kernels", "capturing CUDA graphs"
ENGINE, SERVER = "starting the engine", "starting the server"
POC, PROBE = "preparing PoC", "waiting for the startup probe"

#: The rest of a progress bar's name, and how far it is. Both are bounded, or a long line would take seconds.
_BAR = r"[^\r\n:|]{0,60}: {1,4}(?P<percent>\d{1,3})%"
#: Each step by what vLLM writes when it begins or goes on. What ends a step is the first sign of the next one.
_SIGNS: Mapping[str, tuple[str, ...]] = {
    ENGINE: ("non-default args: ", r"Initializing a V1 LLM engine \("),
    # A name and no folder: it comes from the Hub, or the cache. vLLM shows no progress of that.
    FETCHING: (r"Starting to load model (?!/)",),
    # Of ModelScope, and of huggingface_hub, which is silent without a terminal unless TQDM_POSITION is -1.
    DOWNLOADING: (
        rf"(?:Fetching \d+ files|Reconstructing){_BAR}",
        rf"\.(?:safetensors|bin|pt|gguf)\b(?:: [a-z ]+)?{_BAR}",
    ),
    READING: (
        r"Starting to load model /",
        "Time spent downloading weights for ",
        rf"(?:Loading \w+ checkpoint shards|Multi-thread loading (?:pt checkpoint )?shards){_BAR}"
        r" Completed \| (?P<done>\d+)/(?P<files>\d+)",
        rf"Loading safetensors using {_BAR}",  # their bars count tensors
    ),
    PREPARING: ("Loading weights took ",),
    COMPILING: (
        r"Warming up model for the compilation\.",
        r"Starting torch\.compile",
        r"for vLLM's torch\.compile",
        "Dynamo bytecode transform time: ",
        "(?:Compiling a graph|Cache the graph|Directly load the compiled graph)",
        "Compile and warming up model for size ",
    ),
    MEASURING: (
        "Model loading took ",
        r"torch\.compile (?:took|takes) [\d.]+ s in total",
        "Initial profiling/warmup run took ",
        "Profiling CUDA graph memory: ",
        "Available KV cache memory: ",
    ),
    WARMING: (
        r"KV cache size: ",
        r"Warming up (?!model for the compilation|done|multi-modal|chat template)",
        "JIT kernel warmup starting",
        "Running FlashInfer autotune",
        "Autotuning process starts",
        rf"(?:DeepGEMM warmup|JIT kernel warmup|Compiling CuTeDSL kernels){_BAR}",
    ),
    CAPTURING: (rf"Capturing [^\r\n:|]{{0,40}}CUDA graphs{_BAR}",),
    SERVER: (
        "Graph capturing finished in ",
        r"init engine \(",
        "Starting vLLM server on ",
        r"\] Route: /",  # more of them than lines that are read
        r"Started server process \[",
    ),
    POC: (r"Waiting for application startup\.", r"\] PoC (?:computes with|left chat's) "),
    PROBE: (r"Application startup complete\.",),
}
_STEPS = [(step, re.compile(sign)) for step, signs in _SIGNS.items() for sign in signs]

#: Seconds for which a pod of no fleet may load without a startup probe: the default of `podStartupSeconds`.
_LOADS_SECONDS = 3600

_BREAKS = re.compile(r"[\r\n]+")
#: Sequences by which programs colour their words, and whatever else a terminal would obey.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class LogEnd:
    """The end of a pod's log; ``error`` says why it could not be read."""

    text: str = ""
    error: str = ""


class Step(ApiModel):
    """What vLLM does before it serves, and how far it is with that, as far as it tells."""

    step: str
    percent: int | None = None
    #: Files of weights that are read, of so many.
    done: int | None = None
    files: int | None = None

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.short}{f' ({self.done} of {self.files} files)' if self.files else ''}"

    @property
    def short(self) -> str:
        """The same with the percent alone."""
        return self.step if self.percent is None else f"{self.step} {self.percent} %"


def loads(pod: PodView, now: datetime) -> bool:
    """Whether a pod of no fleet loads its model, by its container alone. Of pods of fleets the fleet's status tells."""
    until = pod.loads_until(pod.serving_port(DEFAULT_PORT), _LOADS_SECONDS)
    # Which container has vLLM is a guess: if any of them has ended, that is told.
    is_whole = not any(one.ended for one in pod.containers)
    return FLEET_LABEL not in pod.labels and is_whole and until is not None and now < until


def server_name(pod: PodView) -> str:
    """Return the name of the container in which vLLM runs."""
    return CONTAINER if FLEET_LABEL in pod.labels else pod.container(pod.serving_port(DEFAULT_PORT)).name


def step_of(log: str) -> Step | None:
    """Return the step that the last known words of a log are about; None if it has none.

    Bars write over themselves, so that a line may have several states of one.
    """
    found = [(match.start(), step, match) for step, sign in _STEPS for match in sign.finditer(log)]
    if not found:
        return None
    _, step, match = max(found, key=lambda one: one[0])
    return Step(step=step, **{name: int(value) for name, value in match.groupdict().items() if value})


def last_line(log: str) -> str:
    """Return the last line of a log that says anything, without what a terminal would obey; empty if none does."""
    lines = (_CONTROLS.sub("", line).strip() for line in reversed(_BREAKS.split(log)))
    return next((line for line in lines if line), "")
