# SPDX-License-Identifier: Apache-2.0
"""What one fleet serves and on which GPUs: by its spec, the presets, and the GPU products of the cluster.

A preset is a model with the flags, GPUs and figures that fit together, one YAML document. Those of the package are in
``presets/``; more may come from ConfigMaps, and replace those of the package by their name.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from poc_operator.apis.v1alpha1.fields import ObjectName
from poc_operator.apis.v1alpha1.fleet import MAX_STARTUP_SECONDS, FleetSpec, FleetStatus
from poc_operator.apis.v1alpha1.fleet_decode import reserve_bytes
from poc_operator.apis.v1alpha1.fleet_pod import MAX_GPUS, OWN_VARIABLES, PRODUCT_LABEL, own_flag
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.validation import StatTest
from poc_operator.fleets.decode import Argument, DecodeEntry, chains
from poc_operator.fleets.self_check import unpacked

#: The product of an entry that fits every GPU.
ANY = "any"
#: Words of the products of GPUs that are shared or cut up: they have less memory than an entry counts on.
_PARTS = {"MIG", "SHARED"}
#: How long a pod may load unless the spec says otherwise, and what a preset's weights add: 170 Mbit/s are enough then.
STARTUP_SECONDS, SECONDS_PER_GIB = 3600, 50

Variables = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


def times(count: int, product: str) -> str:
    """Return how a number of GPUs is written."""
    return f"{count} × {product}"  # noqa: RUF001 - as people write it


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GpuEntry(_Document):
    """What a preset has for one kind of GPU: how many a pod needs, and the flags for them.

    ``product`` is a word of the node label's value: `H200` fits `NVIDIA-H200`. ``noncesPerMinute`` is a published
    figure for one pod, not measured here.
    """

    product: Annotated[str, Field(pattern=r"^[A-Za-z0-9]+$", max_length=63)]
    count: Annotated[int, Field(ge=1, le=MAX_GPUS)]
    tensor: Annotated[int, Field(ge=1, le=MAX_GPUS)]
    pipeline: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    args: tuple[Argument, ...] = ()
    env: Variables = Field(default_factory=dict)
    nonces_per_minute: Annotated[int, Field(ge=1, le=10**6)] | None = Field(default=None, alias="noncesPerMinute")
    decode: DecodeEntry | None = None

    @model_validator(mode="after")
    def _uses_all_gpus(self) -> Self:
        if self.tensor * self.pipeline != self.count:
            raise ValueError(f"tensor * pipeline must be count: {self.tensor} * {self.pipeline} is not {self.count}")
        return self

    def fits(self, product: str) -> bool:
        """Whether the entry is for GPUs of this product, as a node label or a user names it."""
        words = {word.upper() for word in product.split("-")}
        return not words & _PARTS and (self.product == ANY or self.product.upper() in words)

    @property
    def all_args(self) -> tuple[Argument, ...]:
        """All flags of the entry, those for the decode scheme too."""
        return (*self.args, *(self.decode.args if self.decode is not None else ()))

    def __str__(self) -> str:
        return times(self.count, self.product)


class GoldenVectors(_Document):
    """What the model computes for the first nonces of a self-check, as somebody has measured it.

    ``vectors`` are theirs one after the other, as base64 of fp16 numbers, little-endian.
    """

    seq_len: Annotated[int, Field(ge=1, le=65_536)] = Field(alias="seqLen")
    k_dim: Annotated[int, Field(ge=1, le=4096)] = Field(alias="kDim")
    vectors: Annotated[str, Field(min_length=1, max_length=200_000)]

    @model_validator(mode="after")
    def _vectors_are_whole(self) -> Self:
        if None in unpacked(self.vectors, self.k_dim):
            raise ValueError("vectors must all be finite")
        return self


class PresetStatTest(StatTest):
    """The network's statistical test for prefill of a model, as a fleet's spec writes it."""

    model_config = ConfigDict(extra="forbid")


class Preset(_Document):
    """A model, and what is known of it on each kind of GPU.

    ``seqLen``, ``kDim`` and ``statTest`` are the network's for prefill. ``weightsGiB`` is what the weights take in a
    cache, if known. Self-checks judge by ``statTest`` as far as a fleet's spec does not say otherwise. With ``golden``
    they compare pods with these vectors, whatever other pods compute.
    """

    name: Annotated[ObjectName, Field(max_length=63)]
    model: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^-\s][^\s]*$")]
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$", max_length=128)] | None = None
    seq_len: Annotated[int, Field(ge=1, le=1_048_576)] = Field(alias="seqLen")
    k_dim: Annotated[int, Field(ge=1, le=4096)] = Field(alias="kDim")
    weights_gib: Annotated[int, Field(ge=1, le=100_000)] | None = Field(default=None, alias="weightsGiB")
    stat_test: PresetStatTest | None = Field(default=None, alias="statTest")
    golden: GoldenVectors | None = None
    args: tuple[Argument, ...] = ()
    gpus: Annotated[tuple[GpuEntry, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _sets_nothing_of_the_spec(self) -> Self:
        flags = [flag for flag in (*self.args, *(flag for gpu in self.gpus for flag in gpu.all_args)) if own_flag(flag)]
        names = [name for gpu in self.gpus for name in gpu.env if name in OWN_VARIABLES]
        if flags or names:
            raise ValueError(f"must not set {', '.join([*flags, *names])}: fields of the fleet stand for them")
        return self

    def entry(self, product: str, count: int | None) -> GpuEntry | None:
        """Return the entry for so many GPUs of a product; without ``count`` the one with the fewest. None without."""
        fitting = sorted((gpu for gpu in self.gpus if gpu.fits(product)), key=lambda gpu: gpu.count)
        return next((gpu for gpu in fitting if count in (None, gpu.count)), None)

    def nearest(self, product: str, count: int | None) -> GpuEntry:
        """Return the entry that is nearest: another number of these GPUs, else one of other GPUs."""
        fitting = [gpu for gpu in self.gpus if gpu.fits(product)] or self.gpus
        return min(fitting, key=lambda gpu: abs(gpu.count - (count or gpu.count)))


class PresetError(ValueError):
    """A preset that cannot be used; the message names field and remedy."""


@dataclass(frozen=True)
class Invalid:
    """A preset that somebody has written wrongly: why it cannot be used."""

    why: str


Presets = Mapping[str, Preset | Invalid]


def parse_preset(text: str) -> Preset:
    """Return the preset of a YAML document. PresetError if it is none."""
    try:
        return Preset.model_validate_json(_json(text))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise PresetError(f"{field or 'it'}: {first['msg']}") from error
    # Of a date that does not exist, keys that are none in JSON, and what holds itself, YAML or JSON say it otherwise.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise PresetError(f"it is no YAML of a preset: {' '.join(str(error).split())}") from error


def _json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), default=str)


@cache
def packaged() -> Presets:
    """Return the presets that come with the operator, by name."""
    folder = files(__package__) / "presets"
    found = (parse_preset(path.read_text()) for path in folder.iterdir() if path.name.endswith(".yaml"))
    return {preset.name: preset for preset in found}


def with_config_maps(entries: Iterable[tuple[str, str, str]]) -> Presets:
    """Return all presets: those of the package, and those of ConfigMaps as ``(ConfigMap, key, text)``.

    A key is `NAME.yaml`. One that is wrong takes its name all the same: the packaged preset would be another one.
    """
    found: dict[str, Preset | Invalid] = {}
    for config_map, key, text in sorted(entries):
        name = key.removesuffix(".yaml")
        where = f'key "{key}" of ConfigMap "{config_map}"'
        try:
            preset = parse_preset(text)
        except PresetError as error:
            found[name] = Invalid(f"{where}: {error}")
            continue
        if preset.name != name:
            found[name] = Invalid(f'{where}: name is "{preset.name}": the key must be "{preset.name}.yaml"')
        elif name in found:
            found[name] = Invalid(f"{where}: another ConfigMap has this preset too: remove one of them")
        else:
            found[name] = preset
    return {**packaged(), **found}


def names(presets: Presets) -> Sequence[str]:
    """Return the names of the presets that can be used, in order."""
    return sorted(name for name, preset in presets.items() if isinstance(preset, Preset))


#: The Secret with the token of a namespace's pods, unless the operator is told another one.
TOKEN_SECRET = "vllm-poc-token"  # noqa: S105 - a name
#: The volume of pods that has it.
TOKEN_VOLUME = "vllm-poc-operator-token"  # noqa: S105 - a name


@dataclass(frozen=True)
class Refusal:
    """Why a fleet cannot be kept as its spec says, and what to do."""

    reason: Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What the pods serve, and how. ``gpu_product`` is the value of the node label, None where any GPU will do.

    ``nonces_per_minute`` is a published figure for one pod, ``stat_test`` what the preset has of it. ``reserve_bytes``
    of each GPU are for chains of the decode scheme. ``startup_seconds`` is how long a pod may load. ``remembered`` says
    that it is from a status, which has neither flags nor vectors of a preset.
    """

    model: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    gpu_product: str | None = None
    gpu_count: int = 0
    tensor: int = 1
    pipeline: int = 1
    seq_len: int | None = None
    k_dim: int | None = None
    nonces_per_minute: int | None = None
    stat_test: StatTest = field(default_factory=StatTest)
    golden: GoldenVectors | None = None
    reserve_bytes: int = 0
    startup_seconds: int = STARTUP_SECONDS
    remembered: bool = False


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fleet is resolved in. ``products`` are those of the cluster's Kubernetes nodes, None if the operator may
    not read them. ``image`` is the worker image of fleets that name none, ``token_secret`` the Secret whose token the
    operator sends to pods, ``gateway_host`` where pods deliver if there is a gateway. ``pod_monitors`` says whether
    the cluster knows PodMonitors, and ``leader_worker_sets`` whether it knows LeaderWorkerSets."""

    presets: Presets
    products: Sequence[str] | None = None
    image: str | None = None
    token_secret: str = TOKEN_SECRET
    gateway_host: str | None = None
    pod_monitors: bool = False
    leader_worker_sets: bool = False


def resolve(spec: FleetSpec, around: Surroundings, *, chosen: str = "") -> Resolved | Refusal:
    """Return what the pods serve and how, or why that cannot be said.

    ``chosen`` is the product that the fleet has so far: Kubernetes nodes that come and go change nothing.
    """
    if spec.image is None and around.image is None:
        return Refusal(
            Reason.IMAGE_MISSING,
            "there is no worker image: set spec.image, or fleets.image.repository of the operator's chart",
        )
    if spec.kubernetes_nodes > 1 and not around.leader_worker_sets:
        return Refusal(
            Reason.LEADER_WORKER_SET_UNKNOWN,
            "the cluster does not know LeaderWorkerSets, which parallelism.kubernetesNodes needs: install "
            "LeaderWorkerSet (https://lws.sigs.k8s.io), or remove parallelism.kubernetesNodes",
        )
    if spec.model.preset is None:
        return _of_path(spec, spec.model.path or "")
    preset = around.presets.get(spec.model.preset)
    if preset is None:
        known = ", ".join(names(around.presets))
        return Refusal(Reason.PRESET_UNUSABLE, f'there is no preset "{spec.model.preset}": choose one of {known}')
    if isinstance(preset, Invalid):
        return Refusal(Reason.PRESET_UNUSABLE, f'preset "{spec.model.preset}" cannot be used: {preset.why}')
    return _too_small(spec, preset) or _of_preset(spec, preset, around, chosen)


def resolved_before(status: FleetStatus) -> Resolved | None:
    """Return what pods were last known to serve, as far as the status has it; None if it has nothing."""
    if not status.model:
        return None
    return Resolved(
        model=status.model,
        gpu_product=status.gpu_product or None,
        gpu_count=status.gpu_count,
        seq_len=status.seq_len,
        k_dim=status.k_dim,
        stat_test=status.stat_test or StatTest(),
        remembered=True,
    )


def _of_path(spec: FleetSpec, path: str) -> Resolved:
    gpus = spec.gpu.count or 0
    ranks = spec.parallelism
    return Resolved(
        model=path,
        gpu_product=spec.gpu.product,
        gpu_count=gpus,
        tensor=ranks.tensor if ranks is not None else max(gpus, 1),
        pipeline=ranks.pipeline if ranks is not None else 1,
        reserve_bytes=reserve_bytes(spec.decode.reserve) if spec.decode is not None and spec.decode.reserve else 0,
        startup_seconds=_startup_seconds(spec, 0),
    )


def _startup_seconds(spec: FleetSpec, weights_gib: int) -> int:
    """Return how long a pod may load: its first start may download the weights."""
    if spec.startup_seconds is not None:
        return spec.startup_seconds
    more = 0 if spec.hugging_face.offline else weights_gib * SECONDS_PER_GIB
    return min(STARTUP_SECONDS + more, MAX_STARTUP_SECONDS)


def _too_small(spec: FleetSpec, preset: Preset) -> Refusal | None:
    size, need = spec.cache.gibibytes, preset.weights_gib
    if size is None or need is None or size >= need:
        return None
    message = f"cache.size is {spec.cache.size}, and the weights of {preset.model} take {need} GiB: make it larger"
    return Refusal(Reason.CACHE_TOO_SMALL, message)


def _of_preset(spec: FleetSpec, preset: Preset, around: Surroundings, chosen: str) -> Resolved | Refusal:
    product = _product(spec, preset, around, chosen)
    if isinstance(product, Refusal):
        return product
    entry = preset.entry(product or "", spec.gpu.count)
    if entry is None:
        nearest = preset.nearest(product or "", spec.gpu.count)
        asked = times(spec.gpu.count, product or "GPU") if spec.gpu.count is not None else product
        return Refusal(
            Reason.GPU_UNSUPPORTED,
            f"preset {preset.name} has no entry for {asked}; the nearest is {nearest}: set gpu to it, or use "
            "model.path with flags of your own",
        )
    reserve = chains(spec, entry.decode, f"preset {preset.name} on {entry}")
    if isinstance(reserve, str):
        return Refusal(Reason.DECODE_UNSUPPORTED, reserve)
    revision = [f"--revision={preset.revision}"] if preset.revision is not None else []
    return Resolved(
        model=preset.model,
        args=[*revision, *preset.args, *entry.args, *reserve.args],
        env=entry.env,
        gpu_product=product,
        gpu_count=entry.count,
        tensor=entry.tensor,
        pipeline=entry.pipeline,
        seq_len=preset.seq_len,
        k_dim=preset.k_dim,
        nonces_per_minute=entry.nonces_per_minute,
        stat_test=preset.stat_test or StatTest(),
        golden=preset.golden,
        reserve_bytes=reserve.bytes,
        startup_seconds=_startup_seconds(spec, preset.weights_gib or 0),
    )


def _named_product(product: str, around: Surroundings) -> str | Refusal:
    """Return the product that the spec names, unless it is the presets' word for one that Kubernetes nodes have."""
    there = around.products or ()
    meant = [known for known in there if product.lower() in known.lower().split("-")]
    if product in there or not meant:
        return product
    return Refusal(
        Reason.GPU_UNKNOWN,
        f'no Kubernetes node has the label {PRODUCT_LABEL}={product}: set gpu.product to "{meant[0]}"',
    )


def _product(spec: FleetSpec, preset: Preset, around: Surroundings, chosen: str) -> str | Refusal | None:
    """Return the product that the pods are for; None if any will do."""
    if spec.gpu.product is not None:
        return _named_product(spec.gpu.product, around)
    if all(entry.fits("") for entry in preset.gpus):
        return None
    if chosen and preset.entry(chosen, None) is not None:
        return chosen
    if around.products is None:
        return Refusal(
            Reason.GPU_UNKNOWN,
            "the operator may not read the labels of Kubernetes nodes: set gpu.product to the value of their label "
            f"{PRODUCT_LABEL}",
        )
    known = [product for product in around.products if preset.entry(product, None) is not None]
    if len(known) == 1:
        return known[0]
    there = ", ".join(around.products) or f"no label {PRODUCT_LABEL}"
    entries = ", ".join(map(str, preset.gpus))
    found = "several of them" if known else f"none of them ({entries})"
    return Refusal(
        Reason.GPU_UNKNOWN,
        f"the Kubernetes nodes have {there}; preset {preset.name} has an entry for {found}: set gpu.product",
    )
