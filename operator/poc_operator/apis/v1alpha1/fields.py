# SPDX-License-Identifier: Apache-2.0
"""Types of fields that several kinds have: decimals as text, nonces, names, and the model that pods must serve."""

from typing import Annotated

from pydantic import Field

from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Int32
from vllm_poc.wire.messages import DEFAULT_K_DIM, MAX_TOKENS
from vllm_poc.wire.partition import MAX_NONCE

#: Longest period that a spec may name, in seconds: a year.
MAX_SECONDS = 31_536_000
#: Integers up to here are exact in every JSON reader.
MAX_EXACT = 2**53 - 1

# The API has no floats: what has decimals is text.
Decimal = Annotated[
    str,
    Field(max_length=24),
    Grammar("[0-9]{1,12}(?:[.][0-9]{1,20})?", 'must be a decimal in quotes, for example "0.02"'),
]
#: A distance as provers write it: small ones with an exponent.
Distance = Annotated[
    str,
    Field(max_length=24),
    Grammar("[0-9]{1,12}(?:[.][0-9]{1,20})?(?:[eE]-[0-9]{1,2})?", 'must be a decimal in quotes, for example "1.398"'),
]
#: A share or a probability, above 0 and below 1.
Probability = Annotated[
    str,
    Field(max_length=17),
    Grammar("0[.][0-9]*[1-9][0-9]*", 'must be a decimal above 0 and below 1 in quotes, for example "0.1"'),
]
#: A target of the distance protocol, above 0 and below 2, which no distance exceeds.
Target = Annotated[
    str,
    Field(max_length=24),
    Grammar(
        "1(?:[.][0-9]+)?|0[.][0-9]*[1-9][0-9]*",
        'must be a decimal above 0 and below 2 in quotes, for example "1.405"',
    ),
]
Seconds = Annotated[int, Field(ge=1, le=MAX_SECONDS, json_schema_extra={"format": "int32"})]
Nonce = Annotated[int, Field(ge=0, le=MAX_NONCE, json_schema_extra={"format": "int32"})]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Grammar(
        "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:[.][a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*",
        "must be an object's name: lower-case letters, digits, '-' and '.', a letter or digit at both ends",
    ),
]


class Model(ApiModel):
    """The model that the pods must serve, and how much of it a nonce takes."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name or path that the pods serve the model under."""
    seq_len: Annotated[Int32, Field(ge=1, le=1_048_576)]
    """Tokens per nonce. At most vLLM's `--max-model-len` and `--max-num-batched-tokens`."""


class SeededModel(Model):
    """The model that the pods must serve, and how its inputs are made."""

    strong_rng: bool = False
    """Seed the inputs with 256 bits instead of 32. Artifact protocol only."""


class Artifact(ApiModel):
    """The artifact protocol: each nonce yields a vector."""

    k_dim: Annotated[Int32, Field(ge=1, le=4096)] = DEFAULT_K_DIM
    """Numbers per vector. At most the model's hidden size."""


class Decode(ApiModel):
    """The decode scheme of artifacts: each nonce yields a chain of indices."""

    max_tokens: Annotated[Int32, Field(ge=1, le=MAX_TOKENS)]
    """Decode steps per nonce, after the prefill. The network takes 256."""
