# SPDX-License-Identifier: Apache-2.0
"""What the packages promise of their modules, as far as import-linter cannot say it."""

import re
from collections import Counter
from pathlib import Path

import poc_gateway

PACKAGE = Path(poc_gateway.__file__).parent
MODULES = [path for path in PACKAGE.rglob("*.py") if "versions" not in path.parts]
#: These mean the same in every package: its routes, and what they are asked with and answer.
SHARED_NAMES = {"__init__", "routes", "messages"}
_TABLES = "slots|late_items|ended_ranges|callbacks"
_VERBS = "(?:insert|update|delete)"
_CHANGE = re.compile(rf"\b{_VERBS}\((?:schema\.)?({_TABLES})\b|\b({_TABLES})\.{_VERBS}\(")


def changes(path: Path) -> set[str]:
    """The ledger's tables that a module changes."""
    return {one or other for one, other in _CHANGE.findall(path.read_text())}


def test_one_name_has_one_meaning() -> None:
    names = Counter(path.stem for path in MODULES)
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES


def test_only_the_ledger_changes_what_is_to_be_sent() -> None:
    found = {str(path.relative_to(PACKAGE)): changes(path) for path in MODULES}
    assert found.pop("outbox/ledger.py") == {"slots", "late_items"}
    assert found.pop("outbox/endings.py") == {"slots", "late_items", "ended_ranges"}
    assert found.pop("outbox/rivals.py") == {"late_items"}
    assert found.pop("outbox/callback_ledger.py") == {"callbacks"}
    # A round is written down with its slots, at which nothing has arrived yet.
    assert found.pop("store/rounds.py") == {"slots"}
    # With a round that is being deleted its slots go, when nothing is left in them.
    assert found.pop("store/retention.py") == {"slots"}
    assert {path: tables for path, tables in found.items() if tables} == {}


def test_a_package_says_what_belongs_in_it_and_what_does_not() -> None:
    packages = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert len(packages) == 6
    for package in packages:
        text = (package / "__init__.py").read_text()
        assert "What belongs here:" in text, package
        assert "What does not:" in text, package
