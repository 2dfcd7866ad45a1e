"""From what the ranks measured to the fields of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bench_case import Case, Figure
from .bench_check import Check
from .bench_domino import StackCase
from .bench_setting import Place, Setting, gather
from .bench_trace import Traced
from .bench_variants import Plan
from .floors import Rates
from .timing import Series, percentiles, slowest_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A case, seen by all ranks.

    Attributes:
        case: which one.
        slowest: by mark, of each iteration the time of its slowest rank.
        wrong, err: of all ranks.
        ranks: float64 [R, 6]: peak bytes and the fields of Traced; NaN where unknown.
    """

    case: Case
    slowest: dict[str, list[float]]
    wrong: int
    err: float
    ranks: Tensor

    def most(self, column: int) -> float | None:
        """Largest value of a column over the ranks."""
        return _known(float(self.ranks[:, column].max()))

    def times(self, marks: Sequence[str]) -> tuple[float, float, float]:
        """10th, 50th and 90th percentile of the sum of some marks."""
        return percentiles([sum(times) for times in zip(*(self.slowest[mark] for mark in marks), strict=True)])

    def values(self) -> dict[str, Any]:
        """Fields that all rows of a case share."""
        checked = not (isinstance(self.case, StackCase) and not self.case.plan.real)
        peak, syncs, blocks = (self.most(column) for column in (PEAK, SYNCS, BLOCKS))
        return {
            "pass_": self.case.pass_, **self.case.row_values(),
            "wrong": self.wrong if checked else None, "err": self.err if checked else None,
            "peak_mib": round(peak / 2**20, 1) if checked and peak is not None else None,
            "host_syncs": None if syncs is None else round(syncs),
            "sms": None if blocks is None else round(blocks),
        }  # fmt: skip


PEAK, COMM, EXPOSED, GEMM, BLOCKS, SYNCS = range(6)


def measured(case: Case, series: Series, check: Check, traced: Traced, place: Place) -> Measured:
    """Gather what this rank knows of a case. Collective."""
    own = [series.peak_bytes, traced.comm_us, traced.exposed_us, traced.gemm_us, traced.comm_blocks, traced.host_syncs]
    row = [float(check.wrong), check.err, *(math.nan if value is None else float(value) for value in own)]
    all_R8 = gather(torch.tensor(row, dtype=torch.float64), place)
    return Measured(
        case=case,
        slowest=slowest_rank(series.us, place.group, place.device),
        wrong=int(all_R8[:, 0].sum()),
        err=float(all_R8[:, 1].max()),
        ranks=all_R8[:, 2:],
    )


def stage_values(figure: Figure, found: Measured, setting: Setting, rates: Rates | None) -> dict[str, Any]:
    """Times, floor, bytes and bandwidths of one row.

    route_bytes and dedup_bytes are one trip's, of the busiest rank, averaged over the iterations: all the expert rows
    it sends, and what crosses the busier direction of its link when each token goes to each rank at most once. algbw
    and busbw divide them, times the number of trips, by the median time (10^9 bytes per second).
    """
    p10, p50, p90 = found.times(figure.marks)
    floor_us = None if rates is None else figure.floor_us(setting, rates)
    route_bytes = setting.shape.T * setting.shape.K * setting.row_bytes
    crossing = [max(t.crossing for t in ranks) for ranks in setting.traffic]
    dedup_bytes = round(sum(crossing) / len(crossing) * setting.row_bytes)
    trips = figure.dispatches + figure.combines
    moves = figure.stage is not None
    return {
        "stage": figure.stage, "form": figure.form,
        "us_p10": round(p10, 2), "us_p50": round(p50, 2), "us_p90": round(p90, 2),
        "floor_us": None if floor_us is None else round(floor_us, 2),
        "ratio": None if floor_us is None else round(p50 / floor_us, 4),
        "route_bytes": route_bytes, "dedup_bytes": dedup_bytes,
        "algbw": round(trips * route_bytes / p50 / 1e3, 3) if moves else None,
        "busbw": round(trips * dedup_bytes / p50 / 1e3, 3) if moves else None,
    }  # fmt: skip


def domino_values(found: Measured, beside: Sequence[Measured]) -> dict[str, Any]:
    """What a variant of a stack says together with the others of the same pass and M.

    floor_us: the longer of compute and communication alone. hidden_share: 1 - exposed / communication of one traced
    iteration, of the rank with the least. hidden_share_steps: (split - this) / communication, from the times of
    steps. gemm_rate: the GEMMs' time in `compute` over theirs here, of the rank with the least: 1 is undisturbed.
    """
    alike = {_plan(each).variant: each for each in beside if _same(_plan(each), _plan(found))}
    plan, p50 = _plan(found), _p50(found)
    halves = [_p50(alike[name]) for name in ("compute", "communication") if name in alike]
    floor_us = max(halves) if len(halves) == 2 and plan.real else None
    values: dict[str, Any] = {
        "floor_us": None if floor_us is None else round(floor_us, 2),
        "ratio": None if floor_us is None else round(p50 / floor_us, 4),
        "gemm_us": _rounded(found.most(GEMM)),
    }  # fmt: skip
    if plan.real:
        ranks = found.ranks
        values |= {"comm_us": _rounded(found.most(COMM)), "exposed_us": _rounded(found.most(EXPOSED))}
        values["hidden_share"] = _share(1 - ranks[:, EXPOSED] / ranks[:, COMM])
        if "compute" in alike:
            values["gemm_rate"] = _share(alike["compute"].ranks[:, GEMM] / ranks[:, GEMM])
        if plan.variant == "overlapped" and "split" in alike and "communication" in alike and _on_device(found):
            values["hidden_share_steps"] = round((_p50(alike["split"]) - p50) / _p50(alike["communication"]), 4)
    return values


def _plan(found: Measured) -> Plan:
    assert isinstance(found.case, StackCase), "only stacks have variants"
    return found.case.plan


def _same(one: Plan, other: Plan) -> bool:
    return (one.pass_, one.num, one.slots) == (other.pass_, other.num, other.slots)


def _p50(found: Measured) -> float:
    return found.times(found.case.figures[0].marks)[1]


def _on_device(found: Measured) -> bool:
    return found.case.setting.place.device.type == "cuda"


def _share(per_rank: Tensor) -> float | None:
    known = _known(float(per_rank.min()))
    return None if known is None else round(known, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
