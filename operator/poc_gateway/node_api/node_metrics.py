# SPDX-License-Identifier: Apache-2.0
"""The network's metrics schema, version 1: which series an ML node exposes, and how it keeps within the bounds.

The network takes at most 2 MiB and 5 000 series from an ML node, and no label that tells of hosts. Series are therefore
added in blocks, the most important first. A block that does not fit is left out whole: the second group of vLLM's
series goes before the first, and a later replica before an earlier one.

Source: the network's documents on ML node monitoring, schema version 1.
"""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from poc_gateway.node_api.cluster import ReadyPods
from vllm_poc.wire.answers import Gpu

_log = logging.getLogger(__name__)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES, MAX_BYTES = 5_000, 2 * 2**20
#: An exposition is given again for this long.
CACHE_SECONDS = 10.0

#: vLLM's series of the first and the second group, and their kinds.
_FIRST = {
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
}
_SECOND = {
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:cache_config_info": "gauge",
}
#: Series of a GPU: the field of `Gpu`, and the kind.
_GPU = {
    "mlnode_gpu_temp_core_celsius": ("temperature_celsius", "gauge"),
    "mlnode_gpu_temp_hbm_celsius": ("memory_temperature_celsius", "gauge"),
    "mlnode_gpu_power_draw_watts": ("power_watts", "gauge"),
    "mlnode_gpu_power_limit_watts": ("power_limit_watts", "gauge"),
    "mlnode_gpu_sm_clock_hertz": ("sm_clock_hertz", "gauge"),
    "mlnode_gpu_sm_clock_max_hertz": ("sm_clock_max_hertz", "gauge"),
    "mlnode_gpu_clocks_event_reasons": ("clocks_event_reasons", "gauge"),
    "mlnode_gpu_memory_used_bytes": ("memory_used_bytes", "gauge"),
    "mlnode_gpu_memory_free_bytes": ("memory_free_bytes", "gauge"),
    "mlnode_gpu_ecc_dbe_total": ("ecc_double_bit_errors", "counter"),
    "mlnode_gpu_pcie_replay_total": ("pcie_replays", "counter"),
}
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)(?: +\d+)?", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
_OF_A_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
#: Labels that would tell of a host, or of a process in it; and values that would: paths, addresses, ports.
_LEFT_OUT = frozenset({"engine", "host", "hostname", "instance", "pod", "node", "model_name", "replica"})
_TELLS = re.compile(r"/|\d+\.\d+\.\d+\.\d+|:\d{2,5}\b|::")


class Series(NamedTuple):
    """One line: its family and kind, its own name, its labels as they are written (escaped), its value."""

    family: str
    kind: str
    name: str
    labels: Mapping[str, str]
    value: str

    @property
    def line(self) -> str:
        """The line of the exposition."""
        labels = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
        return f"{self.name}{{{labels}}} {self.value}\n"


class Exposition:
    """Blocks of series, within the bounds."""

    def __init__(self, max_series: int = MAX_SERIES, max_bytes: int = MAX_BYTES) -> None:
        self._left = (max_series, max_bytes)
        self._kinds: dict[str, str] = {}
        self._lines: dict[str, list[str]] = {}
        self._keys = set[tuple[str, tuple[tuple[str, str], ...]]]()

    def add(self, block: Iterable[Series]) -> bool:
        """Add all of a block or nothing of it; return whether it fits. A series that is there already is left out."""
        new = {(one.name, tuple(sorted(one.labels.items()))): one for one in block}
        added = [one for key, one in new.items() if key not in self._keys]
        heads = {one.family: len(f"# TYPE {one.family} {one.kind}\n") for one in added if one.family not in self._kinds}
        left = (
            self._left[0] - len(added),
            self._left[1] - sum(len(one.line.encode()) for one in added) - sum(heads.values()),
        )
        if min(left) < 0:
            return False
        self._left = left
        self._keys |= new.keys()
        for one in added:
            self._kinds[one.family] = one.kind
            self._lines.setdefault(one.family, []).append(one.line)
        return True

    def text(self) -> str:
        """Return the exposition, family by family."""
        return "".join(
            f"# TYPE {family} {self._kinds[family]}\n{''.join(lines)}" for family, lines in self._lines.items()
        )


class NodeMetrics:
    """The exposition of an ML node, made anew when it is older than `CACHE_SECONDS`."""

    def __init__(self, pods: ReadyPods, *, model: str | None, version: str) -> None:
        self._pods = pods
        self._model = model
        self._version = version
        self._lock = asyncio.Lock()
        self._made = float("-inf")
        self._text = ""

    async def text(self) -> str:
        """Return the exposition. StoreError if the pods cannot be listed."""
        async with self._lock:
            if monotonic() - self._made > CACHE_SECONDS:
                self._text = await self._make()
                self._made = monotonic()
        return self._text

    async def _make(self) -> str:
        replicas, gpus = await asyncio.gather(self._pods.metrics(), self._pods.gpus())
        now = str(int(time.time()))
        answered = {place: text for place, text in enumerate(replicas) if text is not None}
        told = [gpu for pod in gpus if pod is not None for gpu in pod.devices]
        # Text of many replicas takes a while to read.
        return await asyncio.to_thread(self._compose, answered, len(replicas), told, now)

    def _compose(self, replicas: Mapping[int, str], count: int, gpus: Sequence[Gpu], now: str) -> str:
        exposition = Exposition()
        exposition.add(_service(self._model or "", self._version, count, [*replicas], now, nvml=bool(gpus)))
        exposition.add(of_gpus(gpus))
        left_out = [
            f"{group} group of replica {replica}"
            for group, kinds in (("first", _FIRST), ("second", _SECOND))
            for replica, text in replicas.items()
            if not exposition.add(of_vllm(text, kinds, replica, self._model))
        ]
        if left_out:
            _log.warning("the network's bounds leave no room for %d blocks of metrics: %s", len(left_out), left_out[0])
        return exposition.text()


def of_vllm(text: str, kinds: Mapping[str, str], replica: int, model: str | None) -> list[Series]:
    """Return the series of these families in a vLLM server's exposition, with the labels that the schema wants."""
    found = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line) if line.startswith("vllm:") else None
        if match is None:
            continue
        name, labels, value = match.groups()
        family = name if name in kinds else _OF_A_HISTOGRAM.sub("", name)
        if family not in kinds or (name == family) == (kinds[family] == "histogram"):
            continue
        told = dict(_LABEL.findall(labels or ""))
        kept = {key: value for key, value in told.items() if key not in _LEFT_OUT and not _TELLS.search(value)}
        served = _escaped(model) if model is not None else _last_segment(told.get("model_name", ""))
        found.append(
            Series(family, kinds[family], name, {"model_name": served, "replica": str(replica), **kept}, value)
        )
    return found


def of_gpus(gpus: Sequence[Gpu]) -> list[Series]:
    """Return the series of the GPUs; a sensor that is not there has none."""
    found = []
    for place, gpu in enumerate(gpus):
        labels = {"gpu_index": str(place), "gpu_model": _escaped(gpu.name or "unknown")}
        for name, (field, kind) in _GPU.items():
            value = getattr(gpu, field)
            if value is not None:
                found.append(Series(name, kind, name, labels, f"{value:g}" if isinstance(value, float) else str(value)))
    return found


def _service(model: str, version: str, count: int, replicas: Sequence[int], now: str, *, nvml: bool) -> list[Series]:
    unknown = ("max_num_seqs", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size")
    config = {"model_name": _escaped(model), "dtype": "", "replicas": str(count)} | dict.fromkeys(unknown, "")
    scraped = [{"source": "vllm", "replica": str(replica)} for replica in replicas]
    if nvml:
        scraped.append({"source": "nvml"})
    rows: list[tuple[str, Mapping[str, str], str]] = [
        ("gonka_metrics_schema_info", {"version": "1"}, "1"),
        ("mlnode_version_info", {"version": _escaped(version)}, "1"),
        ("mlnode_config_info", config, "1"),
        *[("mlnode_source_scrape_timestamp_seconds", labels, now) for labels in scraped],
    ]
    return [Series(name, "gauge", name, labels, value) for name, labels, value in rows]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _last_segment(name: str) -> str:
    # A model that is served by its path is named by where it lies.
    return name.rsplit("/", 1)[-1] if name.startswith("/") else name
