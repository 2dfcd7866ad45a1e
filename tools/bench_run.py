"""From options to result rows: build the candidates, time them in turn, check them, fill in the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ep.dispatch import close_dispatchers
from moe_ep.errors import MoEError, RecipeError, Unavailable

from .bench_case import Case, Figure, StageCase
from .bench_check import Check
from .bench_layer import BenchLayer, LayerCase
from .bench_options import Options
from .bench_setting import Place, Problem, Setting, agree, gather, make_setting
from .rows import Row, dtype_name, make_row
from .shapes import make_workload
from .timing import Series, Stopwatch, alternate, count_host_syncs, largest, percentiles, slowest_rank

Emit = Callable[[Sequence[Row]], None]
Key = tuple[str, str]  # dispatcher, pass


class WrongWork(RuntimeError):
    """A candidate moved other rows than its routing says: nothing that this run timed is to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One combination: a level, a shape and a skew, with what its rows have in common."""

    options: Options
    level: str
    setting: Setting

    def row(self, name: str, pass_: str, **values: Any) -> Row:
        """A row of one candidate."""
        shared = {
            "level": self.level, "dispatcher": name, "shape": self.setting.shape._asdict(),
            "R": self.setting.place.num_ranks, "skew": self.setting.workload.skew,
            "skew_realised": round(self.setting.skew_realised, 4), "M": 1, "S": 0,
            "dtype": dtype_name(self.setting.dtype), "experts": self.options.experts if self.level == "layer" else None,
        }  # fmt: skip
        return make_row(**shared, pass_=pass_, **values)

    def lost(self, name: str, status: str, reason: str, **values: Any) -> list[Row]:
        """Rows of a candidate without times, one for each pass."""
        return [self.row(name, pass_, status=status, reason=reason, **values) for pass_ in self.options.passes]


def run(options: Options, place: Place, emit: Emit) -> None:
    """Measure every combination; `emit` gets the rows of each as soon as they are there, on every rank alike.

    Raises:
        RecipeError: options that cannot be measured; nothing was timed.
        WrongWork: a candidate moved other rows than its routing says, after its rows were emitted as failed.
    """
    options.check()
    for shape in options.shapes:
        for skew in options.skews:
            workload = make_workload(shape, place.num_ranks, skew, options.seed)
            setting = make_setting(workload, place, options.dtype, options.warmup + options.iterations)
            for level in options.levels:
                _run_table(Table(options=options, level=level, setting=setting), emit)
            close_dispatchers(place.group)


def _run_table(table: Table, emit: Emit) -> None:
    options, place = table.options, table.setting.place
    watch = Stopwatch(place.device, place.group)
    cases: dict[Key, Case] = {}
    for name in options.candidates:
        built = _build(table, name, watch)
        if isinstance(built, list):
            emit(built)
        else:
            cases |= {(name, pass_): case for pass_, case in built.items()}
    last = options.warmup + options.iterations - 1
    checks: dict[Key, Check] = {}
    bodies = {key: case.run for key, case in cases.items()}
    series = alternate(
        bodies, range(options.warmup, last + 1), watch, lambda key: checks.update({key: cases[key].check(last)})
    )
    _abort_on_wrong_work(table, cases, emit)
    for key, case in cases.items():
        emit(_rows(table, key, case, series[key], checks[key], watch))


def _build(table: Table, name: str, watch: Stopwatch) -> dict[str, Case] | list[Row]:
    """The warmed-up cases of a candidate by pass, or the rows that say why there are none. Collective."""
    options, setting = table.options, table.setting
    cases: list[Case] = []
    problem: Problem | None = None
    try:
        cases = _build_cases(table.level, name, options.experts, setting, options.passes)
    except (RecipeError, Unavailable) as err:
        # raised alike on every rank, by agreement inside or because all ranks have the same options
        return table.lost(name, "refused", str(err))
    except torch.OutOfMemoryError as err:
        problem = ("oom", f"out of memory: {_first_line(err)}")
    problem = agree(problem, setting.place) or _warm_up(options, cases, watch)
    return dict(zip(options.passes, cases, strict=True)) if problem is None else table.lost(name, *problem)


def _build_cases(level: str, name: str, experts: str, setting: Setting, passes: tuple[str, ...]) -> list[Case]:
    """One case for each pass; those of a layer share its weights. Collective.

    Raises:
        RecipeError, Unavailable: a dispatcher or experts that cannot run here, on every rank.
    """
    if level == "stage":
        return [StageCase(name, pass_, setting) for pass_ in passes]
    layer = BenchLayer(name, experts, setting)
    return [LayerCase(layer, pass_, setting) for pass_ in passes]


def _warm_up(options: Options, cases: Sequence[Case], watch: Stopwatch) -> Problem | None:
    """The first failure of any rank, None without one.

    The ranks agree after each iteration: a candidate that fails here is no reason to lose the others.
    """
    for case in cases:
        for iteration in range(options.warmup):
            problem: Problem | None = None
            try:
                case.run(iteration, watch)
            except torch.OutOfMemoryError as err:
                problem = ("oom", f"out of memory: {_first_line(err)}")
            except MoEError as err:
                problem = ("failed", f"{type(err).__name__}: {_first_line(err)}")
            watch.take()
            found = agree(problem, case.setting.place)
            if found is not None:
                return found
    return None


def _first_line(err: BaseException) -> str:
    return str(err).splitlines()[0]


def _abort_on_wrong_work(table: Table, cases: dict[Key, Case], emit: Emit) -> None:
    """Raise WrongWork on every rank if a case moved other rows than the routing says on any. Collective."""
    wrong = []
    for (name, pass_), case in cases.items():
        found = agree(("failed", case.mismatches[0]) if case.mismatches else None, table.setting.place)
        if found is not None:
            wrong.append(f"dispatcher {name!r}: {found[1]}")
            emit([table.row(name, pass_, status="failed", reason=wrong[-1])])
    if wrong:
        raise WrongWork("aborted: " + "; ".join(wrong))


def _rows(table: Table, key: Key, case: Case, series: Series, check: Check, watch: Stopwatch) -> list[Row]:
    """The rows of a case, or one that says that its results are wrong. Collective."""
    place, (name, pass_) = table.setting.place, key
    tally_R2 = gather(torch.tensor([float(check.wrong), check.err], dtype=torch.float64), place)
    wrong, err = int(tally_R2[:, 0].sum()), float(tally_R2[:, 1].max())
    slowest = slowest_rank(series.us, place.group, place.device)
    shared = {"wrong": wrong, "err": err, **_device_figures(case, series, watch, table.options.warmup)}
    if wrong:
        reason = f"{wrong} sampled rows differ from the float64 reference, by up to {err:.2g} of their norm"
        return [table.row(name, pass_, status="failed", reason=reason, **shared)]
    return [table.row(name, pass_, status="ok", **_figures(f, slowest, table), **shared) for f in case.figures]


def _device_figures(case: Case, series: Series, watch: Stopwatch, iteration: int) -> dict[str, Any]:
    """Host syncs and peak memory of an iteration, of the rank with most; null on CPU. Collective."""
    place = case.setting.place
    syncs = count_host_syncs(case.run, iteration, watch)
    both = torch.tensor([-1 if syncs is None else syncs, -1 if series.peak_bytes is None else series.peak_bytes])
    most_syncs, most_bytes = largest(both, place.group, place.device).tolist()
    return {
        "host_syncs": None if most_syncs < 0 else most_syncs,
        "peak_mib": None if most_bytes < 0 else round(most_bytes / 2**20, 1),
    }


def _figures(figure: Figure, slowest: dict[str, list[float]], table: Table) -> dict[str, Any]:
    """Times, floor, bytes and bandwidths of one row.

    route_bytes and dedup_bytes are one trip's, of the busiest rank, averaged over the iterations: all the expert rows
    it sends, and what crosses the busier direction of its link when each token goes to each rank at most once. algbw
    and busbw divide them, times the number of trips, by the median time (10^9 bytes per second).
    """
    setting, rates = table.setting, table.options.rates
    p10, p50, p90 = percentiles([sum(times) for times in zip(*(slowest[mark] for mark in figure.marks), strict=True)])
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
