"""loss.png and load.png of a run, drawn from its metrics.jsonl. Needs matplotlib (the `plots` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.metrics import read_rows


def draw(folder: Path) -> list[Path]:
    """Draw both pictures from `folder`/metrics.jsonl.

    Returns:
        The files written; empty where there is no row yet.

    Raises:
        ImportError: no matplotlib.
        OSError: a picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        return []
    written = []
    for name, paint in (("loss.png", _loss), ("load.png", _load)):
        figure = Figure(figsize=(9, 4.5), layout="constrained")  # no pyplot: no global state, no display
        FigureCanvasAgg(figure)
        paint(figure, rows)
        figure.suptitle(folder.name)
        try:
            figure.savefig(folder / name, dpi=110)
        except OSError:
            (folder / name).unlink(missing_ok=True)  # half a picture
            raise
        written.append(folder / name)
    return written


def _loss(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], label="training", linewidth=1)
    valid = [r for r in rows if r["valid_loss"] is not None]
    if valid:
        axes.plot([r["step"] for r in valid], [r["valid_loss"] for r in valid], "o-", label="held-out", markersize=4)
        entropy = valid[-1]["valid_unigram_entropy"]
        axes.axhline(entropy, linestyle=":", color="grey", label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats/byte")
    axes.grid(alpha=0.3)
    axes.legend()


def _load(figure: Any, rows: list[dict[str, Any]]) -> None:
    for place, (key, title) in enumerate((("expert_imbalance", "experts"), ("rank_imbalance_before", "ranks"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for layer in range(len(rows[0][key])):
            axes.plot([r["step"] for r in rows], [r[key][layer] for r in rows], label=f"layer {layer}", linewidth=1)
        axes.set(xlabel="step", ylabel="load, max/mean", title=title)
        axes.grid(alpha=0.3)
        if 0 < len(rows[0][key]) <= 12:
            axes.legend(fontsize="small")
