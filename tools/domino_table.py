"""A short table of the rows of stacks and steps: what splitting costs, what overlapping gains, what memory it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .rows import Row
from .shapes import PRESETS, Shape

_COLUMNS = (
    *(
        "M",
        "unsplit",
        "split",
        "overlapped",
        "joint",
        "SMs free",
        "compute",
        "comm",
        "x max",
        "hidden",
        "by steps",
        "GEMM rate",
    ),
    *("peak unsplit", "split", "overlapped"),
)
_TASK = ("level", "shape", "R", "skew", "S", "dtype", "dispatcher", "api", "experts", "pass", "attention", "layers")


def domino_lines(rows: Iterable[Row]) -> list[str]:
    """The table as lines; none where there is no ok row of a stack or a step."""
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        if row["variant"] is not None and row["status"] == "ok":
            tasks.setdefault(_describe(row), []).append(row)
    if not tasks:
        return []
    lines = [
        "ms of all layers and micro-batches; peak MiB of an iteration, gradients included; x max: of the longer of"
    ]
    lines += ["compute and comm alone; hidden: share of comm, from a trace and by steps (split - overlapped) / comm"]
    for task, found in tasks.items():
        lines += [task, *_columns([_COLUMNS, *(_cells(found, num, row) for num, row in _lead(found))])]
    return lines


def _describe(row: Row) -> str:
    words = {name: row[name] for name in _TASK if row[name] is not None and (name, row[name]) != ("S", 0)}
    shape = Shape(**row["shape"])
    named = next((name for name, preset in PRESETS.items() if preset == shape), None)
    words["shape"] = named or "T,H,I,E,K=" + ",".join(map(str, shape))
    return " ".join(str(word) if name not in ("R", "skew", "S") else f"{name}={word}" for name, word in words.items())


def _lead(rows: Sequence[Row]) -> list[tuple[int, Row | None]]:
    """(M, overlapped row) of each line: one for each number of SMs left free."""
    found: list[tuple[int, Row | None]] = []
    for num in dict.fromkeys(row["M"] for row in rows):
        overlapped = [row for row in rows if row["M"] == num and row["variant"] == "overlapped"]
        found += [(num, row) for row in overlapped] or [(num, None)]
    return found


def _cells(rows: Sequence[Row], num: int, overlapped: Row | None) -> tuple[str, ...]:
    free_sms = None if overlapped is None else overlapped["reserve_sms"]
    by_variant = {
        row["variant"]: row
        for row in rows
        if row["M"] == num and (row["variant"] not in ("overlapped", "joint") or row["reserve_sms"] == free_sms)
    }
    judged = overlapped or by_variant.get("unsplit")

    def time(variant: str) -> str:
        return f"{by_variant[variant]['us_p50'] / 1e3:.3f}" if variant in by_variant else "-"

    def peak(variant: str) -> str:
        return _text(by_variant[variant]["peak_mib"], ".0f") if variant in by_variant else "-"

    free = "-" if overlapped is None else str(free_sms)
    shares: tuple[str, ...] = ("-",) * 4
    if judged is not None:
        shares = tuple(
            _text(judged[name], ".3f") for name in ("ratio", "hidden_share", "hidden_share_steps", "gemm_rate")
        )
    times = (*map(time, ("unsplit", "split", "overlapped", "joint")), free, time("compute"), time("communication"))
    return (str(num), *times, *shares, peak("unsplit"), peak("split"), peak("overlapped"))


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _columns(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
