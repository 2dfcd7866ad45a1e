"""Sets of time intervals: union, length, difference. A set is a list of disjoint (start, end), ascending."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

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


def difference(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """What the first set has and the second has not.

    Example: difference([(0, 10)], [(2, 3), (8, 12)]) = [(0, 2), (3, 8)].
    """
    holes = list(second)
    left: list[Interval] = []
    done = 0  # holes that lie before every interval to come
    for start, end in first:
        while done < len(holes) and holes[done][1] <= start:
            done += 1
        for hole_start, hole_end in itertools.islice(holes, done, None):
            if hole_start >= end:
                break
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left
