# SPDX-License-Identifier: Apache-2.0
"""What the specs of all kinds have in common: the block, the pods, the deadlines, and that they are fixed."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from poc_operator.apis.v1alpha1.fields import (
    MAX_EXACT,
    MAX_SECONDS,
    Artifact,
    Decode,
    Model,
    ObjectName,
    Seconds,
    SeededModel,
    Target,
)
from poc_operator.apis.v1alpha1.meta import WORKER_LABELS, LabelSelector, fleet_selector
from poc_operator.apis.v1alpha1.schema import (
    MUTABLE,
    VALIDATIONS,
    ApiModel,
    Grammar,
    Int32,
    Int64,
    Mutable,
    Rule,
    aliases,
    cel_text,
)
from vllm_poc.wire.messages import DEFAULT_BATCH_SIZE, ArtifactParams, Protocol

#: Port of vLLM's server.
DEFAULT_PORT = 8000


class ConcurrencyPolicy(StrEnum):
    """What is done about a pod that computes other work."""

    WAIT = "Wait"
    REPLACE = "Replace"
    FAIL = "Fail"


class SampleRetry(ApiModel):
    """What happens when a pod does not answer for the nonces that it was asked for."""

    backoff_limit_per_sample: Annotated[Int32, Field(ge=0, le=1000)] = 10
    """Retries of one sample. It fails when it is lost once more."""


class FleetRef(ApiModel):
    """A PoCFleet of the object's namespace."""

    name: ObjectName
    """Name of the fleet."""


class WorkSpec(ApiModel):
    """What every kind asks of pods. All of it is fixed once the object exists, except the fields marked `Mutable`."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.fleetRef) || !has(self.selector)",
            message="set at most one of fleetRef and selector: remove one of them",
        ),
        Rule(
            rule=f"!has(self.fleetRef) || self.port == {DEFAULT_PORT}",
            message="port is that of the fleet: remove port, or fleetRef",
            field_path=".port",
        ),
    )

    block_hash: Annotated[
        str,
        Field(max_length=66),
        Grammar("[0-9A-Fa-f]{64}", "must be the block's hash: 64 hexadecimal digits, without 0x"),
    ]
    """Hash of the block that started the round: 64 hexadecimal digits, without `0x`."""
    block_height: Annotated[Int64, Field(ge=0, le=MAX_EXACT)]
    """Height of that block."""
    public_key: Annotated[
        str,
        Field(max_length=256),
        Grammar("[A-Za-z0-9+/=_.:-]+", "must be the key's text (hexadecimal or base64), without spaces or line breaks"),
    ]
    """Public key of the host that earns the reward, hexadecimal or base64. It goes into every nonce's seed."""
    model: Model
    """The model that the pods must serve."""
    fleet_ref: FleetRef | None = None
    """The PoCFleet whose pods do the work."""
    selector: LabelSelector | None = None
    """Which pods of the namespace do the work, if not those of a fleet. Without it and `fleetRef`: those with the label
    `poc.gonka.ai/worker: "true"`."""
    port: Annotated[Int32, Field(ge=1, le=65_535)] = DEFAULT_PORT
    """Port of the vLLM server in the pods. With `fleetRef` it is the fleet's."""
    batch_size: Annotated[Int32, Field(ge=1, le=65_536)] = DEFAULT_BATCH_SIZE
    """Largest number of nonces in one forward pass. Provers and validators should use the same."""
    active_deadline_seconds: Annotated[Seconds, Mutable()] | None = None
    """The object fails when its work is not complete so long after the start. Without it, work may take any time."""
    start_deadline_seconds: Annotated[Seconds, Mutable()] = 900
    """The object fails when no pod has started so long after its creation, or after its last suspension ended. It also
    fails when no pod has worked on it for so long since it started. To this the startup time of a pod is added that had
    to load its model meanwhile. The time in which other rounds have the pods does not count; for a round, neither does
    that in which others go before it. It starts anew once the object's turn has come."""
    poll_failure_seconds: Annotated[Seconds, Mutable()] = 300
    """The object fails when none of the pods that work on it has answered for so long. Pods that load their model are
    waited for."""
    pod_startup_seconds: Annotated[Seconds, Mutable()] = 3600
    """How long a pod without a startup probe may load its model. For one with such a probe it is the time that the
    probe allows."""
    suspend: Annotated[bool, Mutable()] = False
    """True stops the pods and keeps what they delivered. False again goes on from there."""
    ttl_seconds_after_finished: (
        Annotated[int, Field(ge=0, le=MAX_SECONDS, json_schema_extra={"format": "int32"}), Mutable()] | None
    ) = None
    """The object is deleted so long after it finished; 0 means at once. Without it, it stays."""

    @property
    def pods(self) -> LabelSelector:
        """Which pods of the namespace do the work."""
        if self.fleet_ref is not None:
            return fleet_selector(self.fleet_ref.name)
        return self.selector or LabelSelector(match_labels=WORKER_LABELS)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = super().__get_pydantic_json_schema__(schema, handler)
        resolved = handler.resolve_ref_schema(json_schema)
        resolved.setdefault(VALIDATIONS, []).append(_immutability(cls, resolved["properties"]).to_json())
        return json_schema


def _immutability(spec: type[ApiModel], properties: dict[str, Any]) -> Rule:
    """Return the one rule by which the API server refuses a change of anything that is not mutable."""
    names = aliases(spec)
    mutable = {name for name in names.values() if _is_mutable(properties[name])}
    same = {
        names[name]: _is_same(names[name], optional=field.default is None)
        for name, field in spec.model_fields.items()
        if names[name] not in mutable
    }
    changed = " + ".join(f"({rule} ? '' : {cel_text(f'{name} ')})" for name, rule in same.items())
    remedy = "delete the object and create a new one"
    return Rule(
        rule=" && ".join(same.values()),
        message=f"only {', '.join(sorted(mutable))} can be changed: {remedy}",
        message_expression=f"{changed} + {cel_text(f'cannot be changed: {remedy}')}",
    )


def _is_mutable(schema: dict[str, Any]) -> bool:
    return any(MUTABLE in option for option in (schema, *schema.get("anyOf", ())))


def _is_same(name: str, *, optional: bool) -> str:
    if not optional:
        return f"self.{name} == oldSelf.{name}"
    there = f"has(self.{name})"
    return f"({there} == has(oldSelf.{name}) && (!{there} || self.{name} == oldSelf.{name}))"


class ProtocolSpec(WorkSpec):
    """What the kinds ask that know all protocols."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="[has(self.rTarget), has(self.artifact), has(self.decode)].filter(x, x).size() == 1",
            message="set exactly one of rTarget (distance protocol), artifact (artifact protocol) and decode "
            "(artifacts of the decode scheme)",
        ),
        Rule(
            rule="!has(self.rTarget) || !self.model.strongRng",
            message="model.strongRng needs the artifact protocol: remove it, or replace rTarget by artifact",
            field_path=".model.strongRng",
        ),
    )

    model: SeededModel
    """The model that the pods must serve."""
    r_target: Target | None = None
    """Selects the distance protocol: a nonce is valid when its distance is below this number. Decimal text."""
    artifact: Artifact | None = None
    """Selects the artifact protocol: each nonce yields a vector. `artifact: {}` will do."""
    decode: Decode | None = None
    """Selects the decode scheme of artifacts: each nonce yields a chain of indices. Pods that do not offer it take no
    part."""

    @property
    def protocol(self) -> Protocol:
        """Which protocol the work is of."""
        if self.decode is not None:
            return Protocol.DECODE
        return Protocol.ARTIFACT if self.artifact is not None else Protocol.DISTANCE

    @property
    def artifact_params(self) -> ArtifactParams | None:
        """The parameters of the artifact protocol as pods take them, in either scheme; None for distances."""
        model, seq_len = self.model.name, self.model.seq_len
        if self.decode is not None:
            return ArtifactParams(model=model, seq_len=seq_len, decode=True, max_tokens=self.decode.max_tokens)
        if self.artifact is not None:
            return ArtifactParams(model=model, seq_len=seq_len, k_dim=self.artifact.k_dim)
        return None
