# SPDX-License-Identifier: Apache-2.0
"""The ML nodes that this gateway stands for, read from the file that ``POC_GATEWAY_ML_NODES`` names.

The file is a list, as YAML or JSON. Each ML node has a name, a template of its rounds, and what makes it different from
the others: a number, a host name, tokens. Two ML nodes share no pods.
"""

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from poc_operator.apis.v1alpha1.meta import NETWORK_ORIGIN, ORIGIN_LABEL, LabelSelector, fleet_selector
from poc_operator.apis.v1alpha1.round import RoundSpec
from poc_operator.apis.v1alpha1.schema import aliases
from poc_operator.apis.v1alpha1.work import DEFAULT_PORT, FleetRef
from poc_operator.credentials import secrets_of

#: Label of the rounds of one ML node, beside that of all rounds that the network asked for.
ML_NODE_LABEL = "poc.gonka.ai/ml-node"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_HOST = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_OF_THE_REQUEST = {"blockHash", "blockHeight", "publicKey", "rTarget", "artifact", "callbackURL"}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class SecretSource(_Entry):
    """Where a secret is: in a file, or in an environment variable."""

    file: Path | None = None
    env: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("set either file or env")
        return self

    def read_several(self) -> tuple[SecretStr, ...]:
        """Return the values, separated by commas and good at the same time. ValueError if there is none."""
        return tuple(SecretStr(value) for value in secrets_of(self.read().get_secret_value()))

    def read(self) -> SecretStr:
        """Return the secret without white space around it. ValueError if there is none."""
        where = f"the file {self.file}" if self.file is not None else f"the environment variable {self.env}"
        try:
            text = self.file.read_text() if self.file is not None else os.environ.get(self.env or "", "")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from None
        if not text.strip():
            raise ValueError(f"{where} holds no token: write one into it")
        return SecretStr(text.strip())


class RoundTemplate(_Entry):
    """Where an ML node's rounds are created, and the part of their spec that the cluster decides."""

    namespace: str = Field(min_length=1)
    spec: dict[str, Any]

    @field_validator("spec")
    @classmethod
    def _leaves_the_rest_to_the_request(cls, spec: dict[str, Any]) -> dict[str, Any]:
        foreign = sorted(_OF_THE_REQUEST & spec.keys())
        if foreign:
            raise ValueError(f"{', '.join(foreign)} come with each request: remove them from the template")
        if "callbackSecretRef" in spec:
            # Whoever sends a request would get the password, at an address of their choice.
            raise ValueError("callbackSecretRef cannot be used with addresses of requests: remove it from the template")
        if set(spec.get("nodes") or {}) - {"groups"}:
            raise ValueError("nodes may only have groups: the ids come with each request")
        unknown = sorted(spec.keys() - aliases(RoundSpec).values())
        if unknown:
            raise ValueError(f"a PoCRound's spec has no {', '.join(unknown)}: see `kubectl explain pocround.spec`")
        _check_pods(spec)
        return spec

    @property
    def selector(self) -> LabelSelector:
        """Which pods serve the network."""
        if "fleetRef" in self.spec:
            return fleet_selector(self.spec["fleetRef"]["name"])
        return LabelSelector.model_validate(self.spec["selector"])

    @property
    def port(self) -> int | None:
        """The port of the pods' server; the CRD's default unless told otherwise. None for a fleet, which sets it."""
        return None if "fleetRef" in self.spec else int(self.spec.get("port", DEFAULT_PORT))

    @property
    def model(self) -> str | None:
        """The name of the model, if the template says it."""
        name = (self.spec.get("model") or {}).get("name")
        return str(name) if name else None

    def spec_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return a round's whole spec."""
        nodes = {**(self.spec.get("nodes") or {}), **asked["nodes"]}
        # Chains cannot be compared between pods, and the network asks for them when it likes.
        template = {name: value for name, value in self.spec.items() if name != "crossCheck" or "decode" not in asked}
        return {**template, **asked, "nodes": nodes}


def _check_pods(spec: Mapping[str, Any]) -> None:
    """ValueError unless the spec says which pods serve the network, in one of two ways."""
    if ("fleetRef" in spec) == ("selector" in spec):
        raise ValueError("set exactly one of fleetRef and selector: the fleet whose pods serve the network, or labels")
    if "fleetRef" not in spec:
        if not str(LabelSelector.model_validate(spec["selector"])):
            raise ValueError("selector is empty and would take every pod: set matchLabels or matchExpressions")
        return
    try:
        FleetRef.model_validate(spec["fleetRef"])
    except ValidationError:
        raise ValueError("fleetRef must have the name of a PoCFleet, as in {name: h200}") from None
    if "port" in spec:
        raise ValueError("port is that of the fleet: remove port, or fleetRef")


def _lower(value: object) -> object:
    return value.lower().removesuffix(".") if isinstance(value, str) else value


class MlNode(_Entry):
    """One ML node as the network knows it.

    ``number`` is the one that the network node gave it: rounds for another number are refused. ``host`` is a host name
    that means this ML node. ``token`` guards its routes, in place of ``POC_GATEWAY_NETWORK_TOKEN``. ``chat_token`` is
    sent to its pods with chat, for pods that were started with ``--api-key``.
    """

    name: str = Field(pattern=_DNS_LABEL)
    number: int | None = Field(default=None, ge=0)
    host: Annotated[str | None, BeforeValidator(_lower)] = Field(default=None, pattern=_HOST)
    token: SecretSource | None = None
    chat_token: SecretSource | None = None
    template: RoundTemplate

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its rounds."""
        return {ORIGIN_LABEL: NETWORK_ORIGIN, ML_NODE_LABEL: self.name}


_FILE = TypeAdapter(list[MlNode])


def load_ml_nodes(path: Path) -> Sequence[MlNode]:
    """Read the file; ValueError says what is wrong with it."""
    try:
        ml_nodes = _FILE.validate_python(yaml.safe_load(path.read_text()))
        _check_differ(ml_nodes)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        what = str(error)
    else:
        return ml_nodes
    raise ValueError(f"POC_GATEWAY_ML_NODES={path}: {what}")


def _check_differ(ml_nodes: Sequence[MlNode]) -> None:
    _check_unique("name", (one.name for one in ml_nodes))
    _check_unique("host", (one.host for one in ml_nodes))
    _check_unique("number", (one.number for one in ml_nodes))
    _check_unique("template", (f"{one.template.namespace}: {one.template.selector}" for one in ml_nodes))


def _check_unique(field: str, values: Iterable[Hashable]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1 and value is not None]
    if twice:
        raise ValueError(f"{field}: {twice[0]} is that of several ML nodes: give each its own")
