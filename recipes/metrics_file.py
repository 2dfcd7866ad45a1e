"""What is kept and said of a step: one row of metrics.jsonl, one line for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from moe_ep.load import rank_load
from recipes.files import RunFolderError, replace_text, writing
from recipes.metrics import StepSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of metrics.jsonl; null where a value does not apply. Imbalance = max/mean, 1 is balanced.

    Attributes:
        tokens_per_s: over all ranks. tflops_per_rank, mfu: of the model's matrix products, recompute not counted.
        step_s, data_s: the whole step, and the part of it spent on making batches.
        peak_mib: most memory of rank 0's process (CPU) or device.
        expert_imbalance, rank_imbalance_before, _after: per MoE layer; before and after replicas.
        replicas: copies of experts in use, per MoE layer, the mean over micro-batches.
        host_syncs: that the dispatchers declare for this step; null on the CPU, which has none.
        valid_loss, valid_unigram_entropy: nats/byte of the held-out text, on steps that validate.
    """

    step: int
    loss: float
    aux_loss: float | None
    z_loss: float | None
    grad_norm: float
    lr: float
    tokens_per_s: float
    tflops_per_rank: float
    mfu: float | None
    step_s: float
    data_s: float
    peak_mib: float
    expert_imbalance: list[float]
    rank_imbalance_before: list[float]
    rank_imbalance_after: list[float]
    replicas: list[float]
    cross_rank_routes: int
    host_syncs: int | None
    eta_s: float
    valid_loss: float | None = None
    valid_unigram_entropy: float | None = None


class MetricsFile:
    """metrics.jsonl of a run; rows after `step` are dropped, so that a resumed run has each step once.

    Beside it load.jsonl has the loads of the same steps: `step`, `experts` [layers][E], `ranks_before` and
    `ranks_after` [layers][R], routes over all ranks and micro-batches.

    Raises:
        RunFolderError: here and in `add`; it cannot be read or written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.loads = path, path.with_name("load.jsonl")
        for file in (self.path, self.loads):
            if file.exists() or file == path:
                kept = [row for row in read_rows(file) if row["step"] <= step]
                replace_text(file, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, row: Row, sums: StepSums | None = None) -> None:
        """Append one row, and the loads of a model with experts."""
        self._append(self.path, asdict(row))
        if sums is not None and len(sums.load):
            home = rank_load(sums.load, sums.rank_rows.shape[1]).tolist()
            after, experts = sums.rank_rows.tolist(), sums.load.tolist()
            loads = {"step": row.step, "experts": experts, "ranks_before": home, "ranks_after": after}
            self._append(self.loads, loads)

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        with writing(path), path.open("a") as out:
            out.write(json.dumps(row, allow_nan=False) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows; a last line that a killed run left half written is not one.

    Raises:
        RunFolderError: it cannot be read, or a line in it is no row.
    """
    try:
        text = path.read_text() if path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in complete.splitlines()]
    except (OSError, ValueError) as err:
        raise RunFolderError(f"{path} cannot be read ({err}); mend it, or rename it to start another") from err


def console_line(row: Row, steps: int) -> str:
    """One line for people."""
    line = (
        f"step {row.step:>{len(str(steps))}}/{steps}  loss {row.loss:.4f}  grad {row.grad_norm:.3f}  lr {row.lr:.2e}  "
        f"{_thousands(row.tokens_per_s)} tok/s  imbalance {_spread(row.expert_imbalance)}  {row.step_s:.3f} s/step  "
        f"eta {timedelta(seconds=round(row.eta_s))}"
    )
    if row.valid_loss is None:
        return line
    return f"{line}  valid {row.valid_loss:.4f} (unigram {row.valid_unigram_entropy:.2f})"


def closing_line(rows: list[dict[str, Any]]) -> str:
    """Balance of the last logged step and speed of the run (median over logged steps), for the program's last words."""
    last, rate = rows[-1], median(row["tokens_per_s"] for row in rows)
    ranks = _spread(last["rank_imbalance_before"])
    if any(last["replicas"]):
        ranks += f", with replicas {_spread(last['rank_imbalance_after'])}"
    return (
        f"imbalance (max/mean, averaged over layers): experts {_spread(last['expert_imbalance'])}, ranks {ranks}; "
        f"{_thousands(rate)} tokens/s over all ranks (median)"
    )


def _spread(layers: list[float]) -> str:
    return f"{sum(layers) / len(layers):.2f}" if layers else "-"


def _thousands(rate: float) -> str:
    return f"{rate / 1e3:.1f}k" if rate < 1e6 else f"{rate / 1e6:.2f}M"
