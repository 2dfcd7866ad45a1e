"""loss.png and load.png of a run, drawn from its metrics.jsonl and load.jsonl. Needs matplotlib (the `plots` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.metrics_file import read_rows


def draw(folder: Path) -> list[Path]:
    """Draw both pictures from `folder`/metrics.jsonl, load.png also from load.jsonl where that is there.

    load.png shows the imbalance of experts and ranks in curves, and below it each expert's and each rank's load over
    the logged steps as a heat map, of ranks without and with replicas.

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
    loads = read_rows(folder / "load.jsonl")
    written = []
    for name, paint, height in (("loss.png", _loss, 4.5), ("load.png", _load, 9 if loads else 4.5)):
        figure = Figure(figsize=(9, height), layout="constrained")  # no pyplot: no global state, no display
        FigureCanvasAgg(figure)
        paint(figure, rows, loads)
        figure.suptitle(folder.name)
        try:
            figure.savefig(folder / name, dpi=110)
        except OSError:
            (folder / name).unlink(missing_ok=True)  # half a picture
            raise
        written.append(folder / name)
    return written


def _loss(figure: Any, rows: list[dict[str, Any]], loads: list[dict[str, Any]]) -> None:
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


def _load(figure: Any, rows: list[dict[str, Any]], loads: list[dict[str, Any]]) -> None:
    grid = figure.add_gridspec(2 if loads else 1, 6)
    steps, replicas = [r["step"] for r in rows], any(any(r["replicas"]) for r in rows)
    for place, (key, title) in enumerate((("expert_imbalance", "experts"), ("rank_imbalance_before", "ranks"))):
        axes = figure.add_subplot(grid[0, 3 * place : 3 * place + 3])
        for layer in range(len(rows[0][key])):
            (line,) = axes.plot(steps, [r[key][layer] for r in rows], label=f"layer {layer}", linewidth=1)
            if replicas and title == "ranks":
                after = [r["rank_imbalance_after"][layer] for r in rows]
                axes.plot(steps, after, "--", color=line.get_color(), linewidth=1)
        axes.set(
            xlabel="step", ylabel="load, max/mean", title=title + " (dashed: with replicas)" * (place and replicas)
        )
        axes.grid(alpha=0.3)
        if 0 < len(rows[0][key]) <= 12:
            axes.legend(fontsize="small")
    panels = (
        ("experts", "experts"),
        ("ranks_before", "ranks, experts at home"),
        ("ranks_after", "ranks, with replicas"),
    )
    for place, (key, title) in enumerate(panels if loads else ()):
        _heat(figure, figure.add_subplot(grid[1, 2 * place : 2 * place + 2]), loads, key, title)


def _heat(figure: Any, axes: Any, loads: list[dict[str, Any]], key: str, title: str) -> None:
    """Steps to the right, experts or ranks of one layer above those of the layer before; white is the layer's mean."""
    columns = [[load / _mean(layer) for layer in row[key] for load in layer] for row in loads]
    picture = [list(line) for line in zip(*columns, strict=True)]
    image = axes.imshow(
        picture, aspect="auto", origin="lower", cmap="coolwarm", vmin=0, vmax=2, interpolation="nearest"
    )
    width, ticks = len(loads[0][key][0]), range(0, len(loads), max(1, len(loads) // 4))
    axes.set_xticks(list(ticks), [str(loads[i]["step"]) for i in ticks])
    axes.set_yticks([width * layer for layer in range(len(loads[0][key]))])
    axes.set_yticklabels([f"layer {layer}" for layer in range(len(loads[0][key]))], fontsize="small")
    axes.set(xlabel="step", title=title)
    figure.colorbar(image, ax=axes, label="load / mean", location="bottom", extend="max")


def _mean(layer: list[float]) -> float:
    return max(sum(layer) / len(layer), 1e-9)
