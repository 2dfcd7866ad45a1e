"""The list in docs/field_reports.md names tests that exist, and threads by their public names only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from moe_ep.testing import contract

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "field_reports.md").read_text()
THREAD = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#\d+")


def tables() -> list[list[str]]:
    """Rows of all tables without their heads, as cells."""
    lines = [line.strip().strip("|").split("|") for line in TEXT.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [row for row in cells if row[0] != "thread" and not row[0].startswith("---")]


def test_every_row_names_public_threads_and_is_complete() -> None:
    rows = tables()
    assert len(rows) > 50
    for row in rows:
        assert len(row) in (2, 5) and all(row), row
        assert all(THREAD.fullmatch(thread) for thread in row[0].split(", ")), row[0]
    tried = [row for row in rows if len(row) == 5]
    assert all("::test_" in row[4] or "contract `" in row[4] for row in tried)
    assert all(re.match(r"holds|fixed|refused|does not apply: ", row[3]) for row in tried)


def test_every_test_named_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT))
    assert len(named) > 60
    for path in {path for path, _ in named}:
        tree = ast.parse((ROOT / path).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing = {test for file, test in named if file == path} - defined
        assert not missing, f"{path} has no {missing}"


def test_every_case_of_the_contract_named_exists() -> None:
    named = set(re.findall(r"contract `([^`X]+)`", TEXT))
    assert len(named) > 20
    assert named <= {case.name for case in contract.CASES}
