"""The stopwatch on CPU, turns, and percentiles."""

from __future__ import annotations

import time

import pytest
import torch

from tools.timing import Stopwatch, alternate, percentiles, slowest_rank

CPU = torch.device("cpu")


def test_a_region_is_timed_from_its_own_begin() -> None:
    watch = Stopwatch(CPU, None)
    watch.begin()
    time.sleep(0.02)
    watch.mark("first")
    time.sleep(0.05)
    watch.begin()
    watch.mark("second")
    found = watch.take()
    assert list(found) == ["first", "second"]
    assert found["first"] >= 20_000 and found["second"] < 50_000
    assert watch.take() == {}


def test_a_mark_without_begin_or_twice_is_a_mistake() -> None:
    watch = Stopwatch(CPU, None)
    with pytest.raises(AssertionError, match="without begin"):
        watch.mark("a")
    watch.begin()
    watch.mark("a")
    with pytest.raises(AssertionError, match="twice"):
        watch.mark("a")


def test_a_device_is_no_faster_than_a_host_that_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is done in a millisecond whatever it gets; the host takes twenty."""

    class Event:
        def elapsed_time(self, end: Event) -> float:
            return 1.0

    watch = Stopwatch(CPU, None)
    monkeypatch.setattr(watch, "_now", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch.begin()
    time.sleep(0.02)
    watch.mark("waits")
    watch.mark("runs ahead", host_waits=False)
    watch.device = torch.device("cuda")
    found = watch.take()
    assert found["waits"] == 1000 and found["runs ahead"] >= 20_000


def test_candidates_take_turns_and_are_looked_at_behind_their_last() -> None:
    calls: list[tuple[str, int]] = []

    def body(name: str, iteration: int, watch: Stopwatch) -> None:
        calls.append((name, iteration))
        watch.begin()
        watch.mark("all")

    bodies = {name: (lambda i, watch, name=name: body(name, i, watch)) for name in ("a", "b")}
    series = alternate(
        bodies,
        range(2, 4),
        Stopwatch(CPU, None),
        before_each=lambda name: calls.append((name, 0)),
        after_last=lambda name: calls.append((name, -1)),
    )
    first, second = (
        [("a", 0), ("a", 2), ("b", 0), ("b", 2)],
        [("a", 0), ("a", 3), ("a", -1), ("b", 0), ("b", 3), ("b", -1)],
    )
    assert calls == first + second
    assert all(len(s.us["all"]) == 2 and s.peak_bytes is None for s in series.values())


def test_percentiles_are_times_that_were_measured() -> None:
    assert percentiles([float(t) for t in range(30, -1, -1)]) == (3.0, 15.0, 27.0)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_one_rank_is_its_own_slowest() -> None:
    us = {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert slowest_rank(us, None, CPU) == us
