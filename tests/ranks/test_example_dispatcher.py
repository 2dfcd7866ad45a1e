"""The example of docs/write_a_dispatcher.md, installed as a package of its own: found by name, keeps the contract."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ep.dispatch import find_dispatcher, known_dispatchers, registry
from moe_ep.testing import contract
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table import COLUMNS, TABLE
from tests.ranks.test_kept_for_backward import BLOCK, TOKENS, K, kept

pytest.importorskip("setuptools", minversion="77", reason="builds a package, which needs setuptools 77")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example_dispatcher"
AS_AGRS = COLUMNS.index("agrs")  # which pads to max_tokens, too
NO_SMS = "so num_sms = 8 would have no effect; leave it unset"
FAST = {"uniform", "one-expert-per-rank", "no-route-slots", "duplicates", "four-tickets", "fault-bad-id", "bfloat16"}
CASES = [
    pytest.param(case, marks=() if case.name.partition("/")[0] in FAST else pytest.mark.slow, id=case.name)
    for case in contract.CASES
    if case.name in TABLE
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks on which the package is installed, in a folder of its own; nothing imports it."""
    site = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for file in EXAMPLE.iterdir():  # a build leaves files beside its sources
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", str(site), str(source)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    sys.path.append(str(site))
    try:
        with RankPool(4, timeout_s=60) as ranks:
            yield ranks
    finally:
        sys.path.remove(str(site))
        registry._classes.pop("equal_blocks", None)
        registry._adopted.discard("equal_blocks")


def test_its_name_is_known_and_nothing_is_imported_before_it_is_asked_for(pool: RankPool) -> None:
    assert "equal_blocks" in known_dispatchers()
    assert "equal_blocks" not in sys.modules
    assert find_dispatcher("equal_blocks").name == "equal_blocks"


def test_it_keeps_what_its_docstring_says(pool: RankPool) -> None:
    block = BLOCK * K  # of each pair of ranks
    for rank, (size, num_rows) in enumerate(pool.run(kept, "equal_blocks", num_ranks=2)):
        assert size == 12 * 2 * block + 4 * TOKENS[rank] * K + 4 * num_rows + 4


@pytest.mark.parametrize("case", CASES)
def test_contract(pool: RankPool, case: contract.Case) -> None:
    refusal = NO_SMS if case.name.startswith("num-sms") else TABLE[case.name][AS_AGRS]
    contract.check(pool, "equal_blocks", case, refusal=refusal)
