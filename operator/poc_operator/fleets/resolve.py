# SPDX-License-Identifier: Apache-2.0
"""What one fleet serves and on which GPUs: by its spec, the presets, and the GPU products of the cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poc_operator.apis.v1alpha1.fleet import FleetSpec
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.presets import Invalid, Preset, Presets, names, times

#: The Secret with the token of a namespace's pods, unless the operator is told another one.
TOKEN_SECRET = "vllm-poc-token"  # noqa: S105 - a name


@dataclass(frozen=True)
class Refusal:
    """Why a fleet cannot be kept as its spec says, and what to do."""

    reason: Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What the pods serve, and how. ``gpu_product`` is the value of the node label, None where any GPU will do.

    ``nonces_per_minute`` is a published figure for one pod.
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


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fleet is resolved in. ``products`` are those of the cluster's Kubernetes nodes, None if the operator may
    not read them. ``image`` is the worker image of fleets that name none, ``token_secret`` the Secret whose token the
    operator sends to pods."""

    presets: Presets
    products: Sequence[str] | None = None
    image: str | None = None
    token_secret: str = TOKEN_SECRET


def resolve(spec: FleetSpec, around: Surroundings, *, chosen: str = "") -> Resolved | Refusal:
    """Return what the pods serve and how, or why that cannot be said.

    ``chosen`` is the product that the fleet has so far: Kubernetes nodes that come and go change nothing.
    """
    if spec.image is None and around.image is None:
        return Refusal(
            Reason.IMAGE_MISSING,
            "there is no worker image: set spec.image, or fleets.image.repository of the operator's chart",
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


def _of_path(spec: FleetSpec, path: str) -> Resolved:
    gpus = spec.gpu.count or 0
    ranks = spec.parallelism
    return Resolved(
        model=path,
        gpu_product=spec.gpu.product,
        gpu_count=gpus,
        tensor=ranks.tensor if ranks is not None else max(gpus, 1),
        pipeline=ranks.pipeline if ranks is not None else 1,
    )


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
    revision = [f"--revision={preset.revision}"] if preset.revision is not None else []
    return Resolved(
        model=preset.model,
        args=[*revision, *preset.args, *entry.args],
        env=entry.env,
        gpu_product=product,
        gpu_count=entry.count,
        tensor=entry.tensor,
        pipeline=entry.pipeline,
        seq_len=preset.seq_len,
        k_dim=preset.k_dim,
        nonces_per_minute=entry.nonces_per_minute,
    )


def _product(spec: FleetSpec, preset: Preset, around: Surroundings, chosen: str) -> str | Refusal | None:
    """Return the product that the pods are for; None if any will do."""
    if spec.gpu.product is not None:
        return spec.gpu.product
    if all(entry.fits("") for entry in preset.gpus):
        return None
    if chosen and preset.entry(chosen, None) is not None:
        return chosen
    if around.products is None:
        return Refusal(
            Reason.GPU_UNKNOWN,
            "the operator may not read the labels of Kubernetes nodes: set gpu.product to the value of their label "
            "nvidia.com/gpu.product",
        )
    known = [product for product in around.products if preset.entry(product, None) is not None]
    if len(known) == 1:
        return known[0]
    there = ", ".join(around.products) or "no label nvidia.com/gpu.product"
    entries = ", ".join(map(str, preset.gpus))
    found = "several of them" if known else f"none of them ({entries})"
    return Refusal(
        Reason.GPU_UNKNOWN,
        f"the Kubernetes nodes have {there}; preset {preset.name} has an entry for {found}: set gpu.product",
    )
