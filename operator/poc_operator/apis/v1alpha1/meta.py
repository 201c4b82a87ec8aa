# SPDX-License-Identifier: Apache-2.0
"""Names that users and the API server see, the metadata of objects, and label selectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from poc_operator.apis.v1alpha1.schema import ApiModel, Grammar, Rule, cel_text

GROUP = "poc.gonka.ai"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FINALIZER = f"{GROUP}/operator"
COMPONENT = "vllm-poc-operator"
#: Label of the pods that work, unless a selector names others; those of fleets have it.
WORKER_LABELS = {f"{GROUP}/worker": "true"}
#: Label of everything that belongs to a fleet; its value is the fleet's name.
FLEET_LABEL = f"{GROUP}/fleet"
#: What keeps the pods of replicas that span several Kubernetes nodes.
GROUPS_API_VERSION, GROUPS_KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
#: Label of all pods of a LeaderWorkerSet, and of its StatefulSet of leaders; its value is the set's name.
GROUPS_LABEL = "leaderworkerset.sigs.k8s.io/name"
#: Label of a LeaderWorkerSet's pods and revisions that tells which revision they have.
GROUPS_REVISION_LABEL = "leaderworkerset.sigs.k8s.io/template-revision-hash"
#: Label of a LeaderWorkerSet's pods, and of its StatefulSets of workers, with the number of their group.
GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
#: Label of the pods that download a model; its value is the Job's name. They are none of the fleet's pods.
DOWNLOAD_LABEL = f"{GROUP}/download"
#: Label of the rounds that the gateway makes on request, and its value for those that the network asked for.
ORIGIN_LABEL, NETWORK_ORIGIN = f"{GROUP}/origin", "network"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The names of a kind; whether it has the scale subresource; and what names its objects may have beside
    Kubernetes' own rules."""

    kind: str
    plural: str
    short: str
    scale: bool = False
    name_rule: Rule | None = None

    @property
    def singular(self) -> str:
        """The name that kubectl shows for one object."""
        return self.kind.lower()


@dataclass(frozen=True)
class Column:
    """A column of ``kubectl get``; ``wide`` ones are shown with ``-o wide`` only."""

    name: str
    type: str
    json_path: str
    description: str
    wide: bool = False


class Metadata(ApiModel):
    """The part of an object's metadata that the operator uses."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    creation_timestamp: datetime
    deletion_timestamp: datetime | None = None


class Resource(ApiModel):
    """One object of a kind."""

    KIND: ClassVar[Kind]
    COLUMNS: ClassVar[tuple[Column, ...]]
    #: What status `True` of each condition means, for a kind whose conditions are not those of work.
    CONDITIONS: ClassVar[Mapping[str, str] | None] = None

    metadata: Metadata

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Build the object from the API server's JSON. ``pydantic.ValidationError`` if it cannot be one."""
        return cls.model_validate(dict(body))

    @property
    def id(self) -> str:
        """The object's id on the wire. One deleted and created anew under its old name is another one."""
        return self.metadata.uid


_PREFIX = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:[.][a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*"
_NAME = "[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = f"(?:{_PREFIX}/)?{_NAME}"
LABEL_VALUE = f"(?:{_NAME})?"
_KEY_MESSAGE = (
    "must be a label's key: an optional DNS prefix and a slash, then up to 63 letters, digits, '-', '_' or '.'"
)
_VALUE_MESSAGE = "must be a label's value: up to 63 letters, digits, '-', '_' or '.', a letter or digit at both ends"

LabelValue = Annotated[str, Field(max_length=63), Grammar(LABEL_VALUE, _VALUE_MESSAGE)]


class Operator(StrEnum):
    """How a label's value relates to the values of a requirement."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class Requirement(ApiModel):
    """A requirement on one label."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
            message="operator In and NotIn need values; Exists and DoesNotExist must have none",
        ),
    )

    key: Annotated[str, Field(min_length=1, max_length=317), Grammar(LABEL_KEY, _KEY_MESSAGE)]
    """The label's key."""
    operator: Operator
    """How the label's value relates to `values`. A pod without the label satisfies NotIn and DoesNotExist."""
    values: Annotated[list[LabelValue], Field(max_length=32)] | None = None
    """The values for In and NotIn."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels satisfies the requirement."""
        value = labels.get(self.key)
        match self.operator:
            case Operator.IN:
                return value in (self.values or [])
            case Operator.NOT_IN:
                return value not in (self.values or [])
            case Operator.EXISTS:
                return value is not None
            case Operator.DOES_NOT_EXIST:
                return value is None

    def __str__(self) -> str:
        values = ",".join(self.values or [])
        texts = {
            Operator.IN: f"{self.key} in ({values})",
            Operator.NOT_IN: f"{self.key} notin ({values})",
            Operator.EXISTS: self.key,
            Operator.DOES_NOT_EXIST: f"!{self.key}",
        }
        return texts[self.operator]


class LabelSelector(ApiModel):
    """Selects pods by their labels, as ``metav1.LabelSelector`` does. A pod must satisfy every part."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="(has(self.matchLabels) && self.matchLabels.size() > 0) || "
            "(has(self.matchExpressions) && self.matchExpressions.size() > 0)",
            message="set matchLabels or matchExpressions: an empty selector would take every pod of the namespace",
        ),
    )

    match_labels: (
        Annotated[
            dict[str, LabelValue],
            Field(max_length=16),
            Rule(
                rule=f"self.all(key, key.size() <= 317 && key.matches({cel_text(f'^(?:{LABEL_KEY})$')}))",
                message=f"each key {_KEY_MESSAGE}",
            ),
        ]
        | None
    ) = None
    """Labels and the values that they must have."""
    match_expressions: Annotated[list[Requirement], Field(max_length=16)] | None = None
    """Requirements on labels, beside `matchLabels`."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is selected."""
        expressions = all(requirement.matches(labels) for requirement in self.match_expressions or [])
        return expressions and (self.match_labels or {}).items() <= labels.items()

    def __str__(self) -> str:
        """The selector as ``kubectl --selector`` and the API server's ``labelSelector`` take it."""
        equal = [f"{key}={value}" for key, value in (self.match_labels or {}).items()]
        return ",".join([*equal, *map(str, self.match_expressions or [])])


def fleet_selector(name: str) -> LabelSelector:
    """Return what selects the pods of a fleet."""
    return LabelSelector(match_labels={FLEET_LABEL: name})
