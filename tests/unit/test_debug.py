"""What the environment variables take, and the delays that MOE_EP_RACE makes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_ep import DispatchConfig, RecipeError, build_dispatcher, race
from moe_ep.debug import Debug, debug
from moe_ep.dispatch.collectives import all_gather, all_to_all
from moe_ep.race import Race, race_of

CONFIG = DispatchConfig(name="all2all", num_experts=4, top_k=2, hidden_size=8)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    debug.cache_clear()
    yield
    debug.cache_clear()


def set_to(patch: pytest.MonkeyPatch, race: str, checks: str = "") -> None:
    patch.setenv("MOE_EP_RACE", race)
    patch.setenv("MOE_EP_DEBUG", checks)


@pytest.mark.parametrize(
    ("race", "checks", "want"),
    [
        ("", "", Debug()),
        ("", "0", Debug()),
        ("7", "", Debug(7)),
        ("-7", "1", Debug(-7, True)),
        ("0", "0", Debug(0)),
    ],
)
def test_what_is_set(monkeypatch: pytest.MonkeyPatch, race: str, checks: str, want: Debug) -> None:
    set_to(monkeypatch, race, checks)
    assert debug() == want
    set_to(monkeypatch, "99", "1")
    assert debug() == want, "read once"


@pytest.mark.parametrize(
    ("race", "checks", "message"),
    [
        ("soon", "", "MOE_EP_RACE = 'soon' must be a whole number"),
        ("1.5", "", "MOE_EP_RACE = '1.5' must be a whole number"),
        ("", "yes", "MOE_EP_DEBUG = 'yes' must be 1"),
    ],
)
def test_what_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, race: str, checks: str, message: str) -> None:
    set_to(monkeypatch, race, checks)
    with pytest.raises(RecipeError, match=message):
        debug()
    with pytest.raises(RecipeError, match=message):
        build_dispatcher(CONFIG)


def test_a_run_says_in_one_line_that_it_is_delayed() -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import moe_ep, torch\n"
        "config = moe_ep.MoEConfig(hidden_size=8, expert_intermediate_size=8, num_experts=4, top_k=2)\n"
        "layers = [moe_ep.MoELayer(config, layer_index=i) for i in range(2)]\n"
        "for layer in layers:\n"
        "    layer.reset_parameters(1)\n"
        "    layer(torch.ones(3, 8))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "MOE_EP_RACE": "3", "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "MOE_EP" in line]
    assert lines == ["moe_ep: MOE_EP_RACE=3: random delays around every communication; this run is slow on purpose"]


def test_delays_are_a_function_of_seed_rank_and_number() -> None:
    def some(seed: int, rank: int) -> list[float]:
        one = Race(seed, rank)
        return [one.delay_s() for _ in range(200)]

    assert some(1, 0) == some(1, 0)
    assert some(1, 0) != some(1, 1) and some(1, 0) != some(2, 0)
    assert all(0 <= delay <= race.LONGEST_S for delay in some(1, 0))
    assert 20 < sum(delay == 0 for delay in some(1, 0)) < 80
    assert max(some(1, 0)) > 0.9 * race.LONGEST_S


def test_results_come_with_the_wait_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to(monkeypatch, "4")
    sent = torch.arange(6.0).view(3, 2)
    for start in (
        lambda out: all_to_all(out, sent, [3], [3], None),
        lambda out: all_gather(out, sent, None),
    ):
        out = torch.zeros(3, 2)
        (work,) = start(out)
        assert out.isnan().all()
        work.wait()
        assert torch.equal(out, sent)
    counts = torch.zeros(2, dtype=torch.int64)
    (work,) = all_gather(counts, torch.tensor([5, 6]), None)
    assert counts.tolist() == [-1, -1]
    work.wait()
    assert counts.tolist() == [5, 6]
    assert race_of(None) is race_of(None), "one sequence of delays a group"


def test_nothing_is_late_without_the_variable() -> None:
    out = torch.zeros(2)
    assert race_of(None) is None
    assert all_gather(out, torch.ones(2), None) == []
    assert out.tolist() == [1, 1]
