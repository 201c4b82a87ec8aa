# SPDX-License-Identifier: Apache-2.0
"""The runbooks: one section for each alert and for each reason of a condition.

What an alert is comes from its rule, what a reason means and asks for from its explanation. ``runbooks.yaml`` beside
this file has the rest. Every heading is a name, so that its anchor is that name in lower case.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, StringConstraints

from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS, Explanation

RULES = Path(__file__).parents[2] / "charts" / "vllm-poc-operator" / "files" / "alerts"
FOLDER = "docs/operate/runbooks"
_FLEET = frozenset({"PoCFleet"})
_NOTE = "<!-- Written by `make generate` from hack/generate/runbooks.yaml: do not edit. -->"
#: The commands of a page as a whole are many and alike: each of them is run once.
_TESTED = "<!-- test: none, tests/docs/test_cluster.py runs each command once -->"

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Steps(_Model):
    """What alerts and reasons share. ``diagnose`` and ``fix`` name commands, ``escalate`` a sentence."""

    impact: Text
    diagnose: Sequence[str]
    fix: Sequence[str]
    escalate: Text


class AlertSteps(Steps):
    """The steps of an alert, with what to do in words. ``findings`` is Markdown: how to read what they print."""

    remedy: Text
    findings: Text | None = None


class ReasonSteps(Steps):
    """The steps of a reason, whose explanation says what to do."""

    urgency: Text


class Runbooks(_Model):
    """All that is written by hand."""

    commands: Mapping[str, Text]
    urgencies: Mapping[str, Text]
    escalations: Mapping[str, Text]
    alerts: Mapping[str, AlertSteps]
    reasons: Mapping[str, ReasonSteps]


@cache
def read() -> Runbooks:
    """Return what is written by hand. ValidationError names a field that is missing or unknown."""
    return Runbooks.model_validate(yaml.safe_load(Path(__file__).with_name("runbooks.yaml").read_text()))


def rules() -> Iterator[Mapping[str, Any]]:
    """Yield the rules of the alerts, as the chart has them."""
    for name in ("operator", "gateway", "pods"):
        for group in yaml.safe_load((RULES / f"{name}.yaml").read_text())["groups"]:
            yield from group["rules"]


def render() -> Mapping[str, str]:
    """Return the pages by their paths in the repository."""
    found = read()
    return {
        f"{FOLDER}/alerts.md": _page("Alerts", _alerts_intro(), _alerts(found)),
        f"{FOLDER}/work.md": _page("Reasons of rounds, validations and calibrations", _reasons_intro(), _work(found)),
        f"{FOLDER}/fleets.md": _page("Reasons of fleets", _reasons_intro(), _fleets(found)),
    }


def _page(title: str, intro: Iterator[str], sections: Iterator[str]) -> str:
    lines = list(sections)
    setup = _setup(asks_gateway=any(line.startswith("gateway ") for line in lines))
    return "\n".join((_NOTE, f"# {title}\n", *intro, *setup, *lines)).rstrip() + "\n"


def _alerts_intro() -> Iterator[str]:
    yield "Each alert has a section, to which its `runbook_url` leads. [Monitor rounds](../monitoring.md#alerts) says"
    yield "how to switch them on. An alert of the severity `critical` fires within 3 minutes, and needs a person.\n"
    yield "If you were paged, begin with `kubectl poc check`: it says what is wrong, and how to mend it."
    yield "`kubectl poc explain` says why one object is where it is."
    yield "`kubectl poc status` shows all fleets, rounds and pods.\n"


def _reasons_intro() -> Iterator[str]:
    yield "Each reason of a condition or an Event has a section. The object's message has names and numbers.\n"


#: As "Read results" of the gateway's page has it: who is paged has no time to look for it.
_GATEWAY = (
    'kubectl -n "$SYSTEM" port-forward service/vllm-poc-operator-gateway 8080 &',
    'TOKEN=$(kubectl -n "$SYSTEM" get secret vllm-poc-operator-gateway-tokens '
    "-o jsonpath='{.data.token}' | base64 -d | cut -d, -f1)",
    'gateway() { curl -sS --fail --retry 5 --retry-connrefused -H "Authorization: Bearer $TOKEN" '
    '"localhost:8080$1" "${@:2}"; }',
)


def _setup(*, asks_gateway: bool) -> Iterator[str]:
    yield "The commands use these names. Set them for your case:\n"
    yield "<!-- test: none, names of the reader's own -->"
    yield "```sh"
    yield "SYSTEM=poc-system         # namespace of the operator and the gateway"
    yield "NAMESPACE=poc             # namespace of the object and its pods"
    yield "OBJECT=pocround/round-1   # kind and name of the object"
    yield "FLEET=qwen"
    yield "POD=qwen-0"
    if asks_gateway:
        yield "\n# asks the gateway, for the commands that begin with it"
        yield from _GATEWAY
    yield "```\n"
    yield "`kubectl poc` is [the plugin](../kubectl-poc.md). Without it, `kubectl describe` shows the same conditions"
    yield "and Events.\n"


def _alerts(found: Runbooks) -> Iterator[str]:
    for rule in rules():
        steps = found.alerts[rule["alert"]]
        critical = rule["labels"]["severity"] == "critical"
        yield f"## {rule['alert']}\n"
        yield f"{rule['annotations']['summary']}\n".replace("{{ $labels.", "`").replace(" }}", "`")
        yield f"Severity `{rule['labels']['severity']}`, after {rule.get('for', '0s')} of:\n"
        yield "```promql"
        yield textwrap.dedent(str(rule["expr"])).strip()
        yield "```\n"
        yield from _fields(steps.impact, found.urgencies["now" if critical else "today"])
        yield f"**What to do.** {' '.join(steps.remedy.split())}\n"
        yield from _steps(found, steps, steps.findings)


def _work(found: Runbooks) -> Iterator[str]:
    return _reasons(found, {str(r): told for r, told in EXPLANATIONS.items() if told.kinds - _FLEET}, "explain")


def _fleets(found: Runbooks) -> Iterator[str]:
    return _reasons(found, {str(r): told for r, told in EXPLANATIONS.items() if told.kinds & _FLEET}, "explain fleet")


def _reasons(found: Runbooks, explained: Mapping[str, Explanation], first: str) -> Iterator[str]:
    """Yield a section for each reason, whose first command is ``first``."""
    for name in sorted(explained):
        told = explained[name]
        yield f"## {name}\n"
        yield f"{told.meaning} (`{told.where}`)\n"
        if told.remedy is None:
            yield "Nothing needs to be done.\n"
            continue
        steps = found.reasons[name]
        yield from _fields(steps.impact, found.urgencies[steps.urgency])
        yield f"**What to do.** {told.remedy}\n"
        yield from _steps(found, steps.model_copy(update={"diagnose": [first, *steps.diagnose]}))


def _fields(impact: str, urgency: str) -> Iterator[str]:
    yield f"**Impact.** {impact}\n"
    yield f"**Urgency.** {urgency}\n"


def _steps(found: Runbooks, steps: Steps, findings: str | None = None) -> Iterator[str]:
    for title, names, after in (("Diagnose", steps.diagnose, findings), ("Fix", steps.fix, None)):
        if names:
            yield f"**{title}.**\n"
            yield _TESTED
            yield "```sh"
            yield from (found.commands[name] for name in names)
            yield "```\n"
        if after:
            yield f"{after}\n"
    yield f"**Escalate.** {found.escalations[steps.escalate]}\n"
