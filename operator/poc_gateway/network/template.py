# SPDX-License-Identifier: Apache-2.0
"""What every round of the network has in common: a file with ``namespace`` and ``spec``, the start of a PoCRound's.

The request brings the rest: block, key, node id, model, protocol, receiver.
"""

import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from poc_operator.apis.v1alpha1.meta import LabelSelector
from vllm_poc.wire.messages import InitGenerateRequest

_OF_THE_REQUEST = {"blockHash", "blockHeight", "publicKey", "rTarget", "artifact", "callbackURL"}


class RoundTemplate(BaseModel):
    """Where the network's rounds are created, and the part of their spec that the cluster decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field(min_length=1)
    spec: dict[str, Any]

    @field_validator("spec")
    @classmethod
    def _leaves_the_rest_to_the_request(cls, spec: dict[str, Any]) -> dict[str, Any]:
        foreign = sorted(_OF_THE_REQUEST & spec.keys())
        if foreign:
            raise ValueError(f"{', '.join(foreign)} come with each request: remove them from the template")
        if set(spec.get("nodes") or {}) - {"groups"}:
            raise ValueError("nodes may only have groups: the ids come with each request")
        if "selector" not in spec:
            raise ValueError("selector.matchLabels is missing: name the labels of the pods that serve the network")
        if not str(LabelSelector.model_validate(spec["selector"])):
            raise ValueError("selector is empty and would take every pod: set matchLabels or matchExpressions")
        return spec

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML or JSON file; ValueError says what is wrong with it."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()))
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            what = str(error)
        raise ValueError(f"POC_GATEWAY_ROUND_TEMPLATE={path}: {what}")

    @property
    def selector(self) -> LabelSelector:
        """Which pods serve the network."""
        return LabelSelector.model_validate(self.spec["selector"])

    @property
    def port(self) -> int:
        """The port of the pods' server; the CRD's default unless told otherwise."""
        return int(self.spec.get("port", 8000))

    def spec_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return a round's whole spec."""
        nodes = {**(self.spec.get("nodes") or {}), **asked["nodes"]}
        return {**self.spec, **asked, "nodes": nodes}


def asked_of(request: InitGenerateRequest, model: str) -> dict[str, Any]:
    """Return the part of the spec that the request decides."""
    node = request.node_id
    asked: dict[str, Any] = {
        "blockHash": request.block_hash,
        "blockHeight": request.block_height,
        "publicKey": request.public_key,
        "nodes": {"first": node, "last": node, "count": request.node_count},
        "model": {"name": model, "seqLen": request.effective_seq_len, "strongRng": request.poc_stronger_rng},
    }
    if request.params is not None:
        asked["artifact"] = {"kDim": request.params.k_dim}
    else:
        asked["rTarget"] = format(Decimal(repr(request.r_target)), "f")
    if "batch_size" in request.model_fields_set:
        asked["batchSize"] = request.batch_size
    if request.receiver is not None:
        asked["callbackURL"] = request.receiver
    return asked


def name_of(asked: dict[str, Any]) -> str:
    """Return the name of the round with this content: the same for the same content."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return f"network-{asked['blockHeight']}-{digest[:10]}"
