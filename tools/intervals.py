"""Sets of time intervals: union, length, difference. A set is a list of disjoint (start, end), ascending."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The set that a number of intervals cover; those that touch become one, empty ones vanish.

    Example: union([(4, 6), (0, 2), (1, 3)]) = [(0, 3), (4, 6)].
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Length of a set."""
    return sum(end - start for start, end in intervals)


def difference(first: Iterable[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What the first set has and the second has not.

    Example: difference([(0, 10)], [(2, 3), (8, 12)]) = [(0, 2), (3, 8)].
    """
    left: list[Interval] = []
    for start, end in first:
        place = bisect_right(second, start, key=lambda hole: hole[1])
        while place < len(second) and second[place][0] < end:
            if second[place][0] > start:
                left.append((start, second[place][0]))
            start = second[place][1]
            place += 1
        if start < end:
            left.append((start, end))
    return left
