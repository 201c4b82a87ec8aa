# SPDX-License-Identifier: Apache-2.0
"""Reading Prometheus' text format."""

from prometheus_client.parser import text_string_to_metric_families


def parse(text: str) -> dict[str, float]:
    """Return the value of each ``poc_*`` series by its name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {_name(s.name, s.labels): s.value for s in samples if s.name.startswith("poc_")}


def parse_pod(text: str, model_name: str) -> dict[str, float]:
    """Return the value of each ``poc_*`` series about a model, by its name and its labels but ``model_name``."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {}
    for sample in samples:
        if sample.name.startswith("poc_") and sample.labels.get("model_name") == model_name:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[_name(sample.name, labels)] = sample.value
    return found


def _name(name: str, labels: dict[str, str]) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name
