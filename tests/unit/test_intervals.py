"""Sets of intervals against membership of single points."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tools.intervals import difference, total, union

intervals = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12)


def points(found: list[tuple[float, float]]) -> set[float]:
    """Middles of the unit steps that lie inside."""
    return {i + 0.5 for i in range(20) if any(start < i + 0.5 < end for start, end in found)}


@given(intervals)
def test_a_union_is_disjoint_ascending_and_covers_the_same(given_: list[tuple[int, int]]) -> None:
    found = union(given_)
    assert points(found) == points(given_) and total(found) == len(points(given_))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(intervals, intervals)
def test_a_difference_is_what_only_the_first_has(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    found = difference(union(first), union(second))
    assert points(found) == points(first) - points(second)
    assert total(found) == len(points(found))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
