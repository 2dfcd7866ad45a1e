"""The range of a number in a configuration, in one place for every section: infinity and NaN are in none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Finite numbers between two ends.

    Attributes:
        above, at_least: the lower end, outside of the range or part of it.
        below, at_most: the upper end alike; none means any finite number.
        why: what a refusal adds, such as "(rows are never dropped)".
    """

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    why: str = ""

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range; NaN lies in none."""
        return self.above < value < self.below and self.at_least <= value <= self.at_most and math.isfinite(value)

    def __str__(self) -> str:
        ends = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        parts = [f"{word} {end:g}" for word, end in ends.items() if math.isfinite(end)]
        open_end = math.isinf(self.below) and math.isinf(self.at_most)
        return " and ".join((["finite"] if open_end else []) + parts) + (f" {self.why}" if self.why else "")


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)


def check_ranges(config: Any, ranges: Mapping[str, Range]) -> None:
    """Refuse the first attribute that lies outside of its range; None, where a field may be unset, lies in all.

    Raises:
        RecipeError: key, value and range.
    """
    for name, allowed in ranges.items():
        value = getattr(config, name)
        if value is not None and not allowed.holds(value):
            raise RecipeError(f"{name} must be {allowed}, got {value}")
