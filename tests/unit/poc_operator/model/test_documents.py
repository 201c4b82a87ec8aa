# SPDX-License-Identifier: Apache-2.0
"""The CRD reference explains everything that the API has, and nothing else."""

import re
from pathlib import Path

from poc_operator.apis.v1alpha1.reasons import Reason

REFERENCE = Path(__file__).parents[4] / "docs" / "crd-reference.md"


def test_every_reason_is_explained() -> None:
    text = REFERENCE.read_text()
    chapters = text[text.index("### Reasons that need something from you") :]
    explained = set(re.findall(r"^\| `(\w+)` \|", chapters, re.MULTILINE))
    assert explained == {reason.value for reason in Reason}
