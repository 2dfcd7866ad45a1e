"""Commands of the documents that train, one after the other as a reader runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINS = re.compile(
    r"^    (?:.*recipes/pretrain\.py recipes/tiny\.toml|tools/demo)(?P<overrides>(?: [\w.]+=\S+)+)", re.M
)


@pytest.mark.parametrize(("page", "fewest"), [("README.md", 4), ("docs/write_a_dispatcher.md", 1)])
def test_other_values_than_those_of_the_demo_have_a_run_of_their_own(page: str, fewest: int) -> None:
    """The demo is finished by then: without another name they would resume it, and train nothing."""
    found = [match["overrides"].split() for match in TRAINS.finditer((ROOT / page).read_text())]
    assert len(found) >= fewest
    for overrides in found:
        assert any(re.fullmatch(r"run\.name=(?!tiny$)\S+", override) for override in overrides), overrides
