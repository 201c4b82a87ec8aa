# SPDX-License-Identifier: Apache-2.0
"""What a fleet's spec says of the decode scheme: the codebook, and the memory for chains."""

from typing import Annotated, ClassVar

from pydantic import Field

from poc_operator.apis.v1alpha1.fields import ObjectName
from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Rule

#: Name of the network's file, which is also its key in a ConfigMap.
CODEBOOK_FILE = "sphere_codebook.pt"
#: Variables of the pods that the fields here stand for.
DECODE_VARIABLES = (
    "VLLM_POC_DECODE_CODEBOOK",
    "VLLM_POC_DECODE_REBUILD_CODEBOOK",
    "VLLM_POC_DECODE_RESERVE_BYTES",
)
#: Memory of one GPU that chains get.
RESERVE = "[1-9][0-9]{0,4}[MG]i"
_BYTES = {"Mi": 2**20, "Gi": 2**30}


def reserve_bytes(reserve: str) -> int:
    """Return the bytes of a reserve such as ``5Gi``."""
    return int(reserve[:-2]) * _BYTES[reserve[-2:]]


class Codebook(ApiModel):
    """Where pods find the network's `sphere_codebook.pt`: exactly one field is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(rule="has(self.configMap) != has(self.path)", message="set exactly one of configMap and path"),
    )

    config_map: ObjectName | None = None
    """A ConfigMap of the fleet's namespace with the file under the key `sphere_codebook.pt`."""
    path: (
        Annotated[
            str,
            Field(max_length=512),
            Grammar("/[^\\x00-\\x20\\x7f]+", "must be an absolute path in the container, without spaces"),
        ]
        | None
    ) = None
    """Path of the file in the container, such as `/cache/sphere_codebook.pt` on the PVC of `cache`."""


class FleetDecode(ApiModel):
    """The decode scheme, which pods offer if they have a codebook and memory for chains."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="has(self.codebook) != self.rebuildCodebook",
            message="set exactly one of codebook (the network's file) and rebuildCodebook (for experiments alone)",
        ),
    )

    codebook: Codebook | None = None
    """The network's codebook."""
    rebuild_codebook: bool = False
    """True: pods make a codebook themselves, for experiments alone. Its chains are not the network's, so rounds and
    validations of the decode scheme take no such pod."""
    reserve: Annotated[str, Field(max_length=7), Grammar(RESERVE, 'must be a size in Mi or Gi, as "5Gi"')] | None = None
    """Memory of each GPU that is set aside for the keys and values of chains, beside vLLM's. Without it: as much as the
    preset has for the GPUs. `model.path` needs it, and flags that leave so much memory."""
