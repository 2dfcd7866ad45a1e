"""A short table of result rows for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .domino_table import domino_lines
from .replica_lines import replica_lines
from .rows import Row

CPU_NOTE = "CPU/gloo: these times show that everything runs and is right; they are not performance."
COLUMNS = (
    *("level", "stage", "pass", "dispatcher", "form", "T,H,I,E,K", "R", "S", "skew"),
    *("p50 us", "p10", "p90", "x floor", "err"),
)


def print_table(header: Row, rows: Sequence[Row], on_cpu: bool) -> None:
    """Machine, rows with times, then the rows without and why."""
    gpu = "no GPU" if header["gpu"] is None else f"{header['gpus']} x {header['gpu']}"
    print(f"\n{gpu}, torch {header['torch']}, commit {header['commit']}, dirty {header['dirty']}")
    plain = [_cells(row) for row in rows if row["status"] == "ok" and row["variant"] is None]
    lines = [COLUMNS, *plain] if plain else []
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))] if lines else []
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for text in [*domino_lines(rows), *replica_lines(rows)]:
        print(text)
    for row in rows:
        if row["status"] != "ok":
            which = "" if row["variant"] is None else f" M={row['M']} {row['variant']}"
            print(f"{row['level']} {row['pass']} {_candidate(row)}{which}: {row['status']}: {row['reason']}")
    if on_cpu:
        print(CPU_NOTE)


def _candidate(row: Row) -> str:
    experts = None if row["experts"] in (None, "torch") else f"experts={row['experts']}"
    return " ".join(filter(None, (row["dispatcher"], row["api"], experts)))


def _cells(row: Row) -> tuple[str, ...]:
    sizes = ",".join(str(row["shape"][name]) for name in "THIEK")
    times = [f"{row[name]:.1f}" for name in ("us_p50", "us_p10", "us_p90")]
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    words = [row["level"], row["stage"] or "-", row["pass"], _candidate(row), row["form"] or "-"]
    return (
        *words,
        sizes,
        str(row["R"]),
        str(row["S"]),
        f"{row['skew_realised']:.2f}",
        *times,
        ratio,
        f"{row['err']:.1e}",
    )
