"""What copies of hot experts make of a skewed layer or stack, a sentence for each dispatcher: against the even one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import Row

_LEVELS = ("layer", "stack", "step")
_SAME = (
    *("level", "pass", "dispatcher", "api", "experts", "R", "dtype", "M", "attention", "layers", "reserve_sms"),
    *("variant", "skew", "S"),
)


def replica_lines(rows: Sequence[Row]) -> list[str]:
    """What is said about copies in rows of one run."""
    return [*sync_lines(rows), *replica_stage_lines(rows), *speed_lines(rows)]


def sync_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each push or pull of weights or gradients by itself, beside plain copies of as many bytes."""
    lines = []
    for row in rows:
        if row["level"] != "kernel" or not str(row["api"]).startswith("replica ") or row["status"] != "ok":
            continue
        share = "" if row["ratio"] is None else f", {1 / row['ratio']:.0%} of the copy's rate"
        lines.append(
            f"{row['api']}: S = {row['S']}, H = {row['shape']['H']}, I = {row['shape']['I']}: {row['dispatcher']} "
            f"{row['us_p50']:.1f} us (p10 {row['us_p10']:.1f}, p90 {row['us_p90']:.1f}), {row['algbw']:.0f} GB/s"
            f"{share}{'  WRONG' if row['wrong'] else ''}"
        )
    return lines


def speed_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each layer or stack with slots: its time and that without slots, as multiples of the even one's time.

    Where several micro-batches interleave, one more for what a placement for all of them costs or gains. Rows that lack
    the even layer (skew 1, no slots) of the same run give no line.
    """
    known = {_key(row): row for row in rows if row["level"] in _LEVELS and row["status"] == "ok"}
    lines = []
    for row in known.values():
        if row["S"] == 0:
            continue
        plain = "overlapped" if row["variant"] == "joint" else row["variant"]
        even, without = (known.get(_key(row, variant=plain, S=0, **how)) for how in ({"skew": 1.0}, {}))
        if even is not None:
            lines.append(_against_even(row, even, without))
        each = known.get(_key(row, variant=plain))
        if row["variant"] == "joint" and each is not None:
            lines.append(
                f"replicas: {_name(row)}: {row['us_p50'] / each['us_p50']:.3f} times the {each['us_p50']:.0f} us with "
                "a placement for each micro-batch"
            )
    return lines


def replica_stage_lines(rows: Sequence[Row]) -> list[str]:
    """A line for each stage of copies: alone, beside its floor, and what the layer's time grows by with it."""
    lines = []
    for row in rows:
        if row["level"] != "stage" or row["S"] == 0 or row["status"] != "ok":
            continue
        floor = "" if row["floor_us"] is None else f" ({row['floor_us'] / row['us_p50']:.0%} of the link's rate)"
        exposed = "unknown" if row["exposed_us"] is None else f"{row['exposed_us']:.1f} us"
        lines.append(
            f"replicas: {_name(row)}: {row['stage']} alone {row['us_p50']:.1f} us{floor}, exposed {exposed}: the "
            "layer's time with it less that without it"
        )
    return lines


def _against_even(row: Row, even: Row, without: Row | None) -> str:
    times = [r["us_p50"] / even["us_p50"] for r in (row, without) if r is not None]
    alone = f", {times[1]:.2f} without" if len(times) > 1 else ""
    return (
        f"replicas: {_name(row)}: {times[0]:.2f} times the even {row['level']}'s {even['us_p50']:.0f} us{alone}; "
        f"{100 / times[0]:.0f} % of its speed"
    )


def _name(row: Row) -> str:
    """Which row, in a few words."""
    candidate = " ".join(str(row[name]) for name in ("dispatcher", "api", "experts") if row[name] is not None)
    shape = ",".join(str(size) for size in row["shape"].values())
    skew = row["skew"] if row["skew_realised"] is None else row["skew_realised"]
    variant = "" if row["variant"] is None else f" M = {row['M']} {row['variant']},"
    return f"{row['level']} {row['pass']} {candidate}, T,H,I,E,K={shape}, skew {skew:.2f},{variant} S = {row['S']}"


def _key(row: Row, **change: Any) -> tuple[Any, ...]:
    changed = row | change
    return (*(changed[name] for name in _SAME), *row["shape"].values())
