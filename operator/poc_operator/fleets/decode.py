# SPDX-License-Identifier: Apache-2.0
"""The decode scheme in a fleet's pods: its codebook, and the memory that chains get beside vLLM's. Pure.

Each GPU of a pod sets the same memory aside. vLLM must leave it, so a preset has the reserve and the flags for it
together. A reserve of the user's beyond that needs flags of the user's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from poc_operator.apis.v1alpha1.fleet import FleetSpec
from poc_operator.apis.v1alpha1.fleet_decode import CODEBOOK_FILE, DECODE_VARIABLES, RESERVE, reserve_bytes

Argument = Annotated[str, Field(min_length=3, max_length=1024, pattern=r"^--[^\x00-\x1f\x7f]+$")]

#: vLLM's flag for the share of a GPU's memory that it takes.
_UTILIZATION = "--gpu-memory-utilization"
#: Where a codebook of a ConfigMap stands in the container.
_FOLDER = "/codebook"
_VOLUME = "codebook"


class DecodeEntry(BaseModel):
    """What a preset has for the decode scheme on one kind of GPU: memory for chains, and flags that leave it.

    ``reserve`` is of each GPU. The flags come after all others of the preset, where a fleet asks for the scheme.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reserve: Annotated[str, Field(pattern=f"^{RESERVE}$")]
    args: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class Chains:
    """Bytes of each GPU for chains, and the preset's flags for them; none without the decode scheme."""

    bytes: int = 0
    args: Sequence[str] = ()


def chains(spec: FleetSpec, known: DecodeEntry | None, where: str) -> Chains | str:
    """Return what chains get in the pods of a preset, or what is wrong and how to mend it.

    ``known`` is what the preset has for the GPUs, and ``where`` names both.
    """
    if spec.decode is None:
        return Chains()
    asked = spec.decode.reserve
    if asked is None and known is None:
        return (
            f"{where} has no memory for the decode scheme: remove decode, or set decode.reserve, and "
            f"{_UTILIZATION} in engineArgs so that vLLM leaves as much"
        )
    left = reserve_bytes(known.reserve) if known is not None else 0
    wanted = reserve_bytes(asked) if asked is not None else left
    if wanted > left and not _sets_utilization(spec):
        leaves = known.reserve if known is not None else "nothing"
        return (
            f"decode.reserve is {asked}, and {where} leaves {leaves} of each GPU for it: set {_UTILIZATION} in "
            "engineArgs so that vLLM leaves as much, or remove decode.reserve"
        )
    return Chains(wanted, known.args if known is not None else ())


def _sets_utilization(spec: FleetSpec) -> bool:
    return _UTILIZATION in {flag.partition("=")[0].replace("_", "-") for flag in spec.engine_args or []}


def variables(spec: FleetSpec, reserve: int) -> Mapping[str, str]:
    """Return the pods' variables for the decode scheme, with so many bytes of each GPU for chains."""
    if spec.decode is None:
        return {}
    codebook, rebuild, reserved = DECODE_VARIABLES
    book = spec.decode.codebook
    where = {codebook: book.path or f"{_FOLDER}/{CODEBOOK_FILE}"} if book is not None else {rebuild: "1"}
    return {**where, reserved: str(reserve)}


def volumes(spec: FleetSpec) -> list[dict[str, Any]]:
    """Return the volume of the codebook, if a ConfigMap has it."""
    book = spec.decode.codebook if spec.decode is not None else None
    if book is None or book.config_map is None:
        return []
    items = [{"key": CODEBOOK_FILE, "path": CODEBOOK_FILE}]
    return [{"name": _VOLUME, "configMap": {"name": book.config_map, "items": items}}]


def mounts(spec: FleetSpec) -> list[dict[str, Any]]:
    """Return where the container has that volume."""
    return [{"name": one["name"], "mountPath": _FOLDER, "readOnly": True} for one in volumes(spec)]
