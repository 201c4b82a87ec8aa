# SPDX-License-Identifier: Apache-2.0
"""Reading Prometheus' text format."""

from prometheus_client.parser import text_string_to_metric_families


def parse(text: str) -> dict[str, float]:
    """Return the value of each ``poc_*`` series by its name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {_name(s.name, s.labels): s.value for s in samples if s.name.startswith("poc_")}


def _name(name: str, labels: dict[str, str]) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name
