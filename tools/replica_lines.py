"""What copies of hot experts make of a skewed layer, in a sentence for each dispatcher: against the even layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import Row

_SAME = ("pass", "dispatcher", "api", "experts", "R", "dtype")


def replica_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each layer with slots: its time and that without slots, as multiples of the even layer's time.

    Rows that lack the even layer (skew 1, no slots) of the same run give no line.
    """
    layers = {
        _key(row, row["skew"], row["S"]): row for row in rows if row["level"] == "layer" and row["status"] == "ok"
    }
    lines = []
    for row in layers.values():
        even, without = layers.get(_key(row, 1.0, 0)), layers.get(_key(row, row["skew"], 0))
        if row["S"] == 0 or even is None:
            continue
        times = [r["us_p50"] / even["us_p50"] for r in (row, without) if r is not None]
        alone = f", {times[1]:.2f} without" if len(times) > 1 else ""
        lines.append(
            f"replicas: {row['dispatcher']} {row['pass']}, skew {row['skew_realised']:.2f}, S = {row['S']}: "
            f"{times[0]:.2f} times the even layer's {even['us_p50']:.0f} us{alone}; {100 / times[0]:.0f} % of its speed"
        )
    return lines


def _key(row: Row, skew: float, slots: int) -> tuple[Any, ...]:
    return (*(row[name] for name in _SAME), *row["shape"].values(), skew, slots)
