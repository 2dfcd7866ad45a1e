"""From options to result rows: build the candidates, time them in turn, check them, fill in the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ep.dispatch import close_dispatchers
from moe_ep.errors import MoEError, RecipeError, Unavailable

from .bench_candidates import Candidate
from .bench_case import Case, Figure
from .bench_check import Check
from .bench_figures import Measured, domino_values, measured, stage_values
from .bench_options import STACKED, Options
from .bench_recipes import recipes
from .bench_replica_stages import ReplicaCase, Times, stage_fields
from .bench_setting import Place, Problem, Setting, agree, make_setting
from .bench_stack import BenchStack, parse_attention
from .bench_trace import Traced, trace_file, trace_once
from .bench_without import WholeCase
from .rows import Row, dtype_name, make_row
from .shapes import make_workload
from .timing import Series, Stopwatch, alternate

Emit = Callable[[Sequence[Row]], None]
Key = tuple[Candidate, int]  # dispatcher, and which of its cases


class WrongWork(RuntimeError):
    """A candidate moved other rows than its routing says: nothing that this run timed is to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One combination: a level, a shape and a skew, with what its rows have in common."""

    options: Options
    level: str
    setting: Setting

    def row(self, candidate: Candidate, **values: Any) -> Row:
        """A row of one candidate."""
        shared = {
            "level": self.level, "dispatcher": candidate.name, "api": candidate.api,
            "shape": self.setting.shape._asdict(), "R": self.setting.place.num_ranks,
            "skew": self.setting.workload.skew, "skew_realised": round(self.setting.skew_realised, 4), "M": 1, "S": 0,
            "dtype": dtype_name(self.setting.dtype), "experts": None if self.level == "stage" else self.options.experts,
        }  # fmt: skip
        return make_row(**shared | values)


def run(options: Options, place: Place, emit: Emit) -> None:
    """Measure every combination; `emit` gets the rows of each as soon as they are there, on every rank alike.

    Raises:
        RecipeError: options that cannot be measured; nothing was timed.
        WrongWork: a candidate moved other rows than its routing says, after its rows were emitted as failed.
    """
    options.check()
    iterations = options.warmup + options.iterations
    for shape in options.shapes:
        for skew in options.skews:
            workload = make_workload(shape, place.num_ranks, skew, options.seed, options.hot_experts)
            for level in options.levels:
                drawn = max(options.micro_batches) if level in STACKED else 1
                setting = make_setting(workload, place, options.dtype, iterations * drawn, options.kernels)
                _run_table(Table(options=options, level=level, setting=setting), emit)
            close_dispatchers(place.group)


def _run_table(table: Table, emit: Emit) -> None:
    options, place = table.options, table.setting.place
    layers = options.layers * max(options.micro_batches) if table.level in STACKED else 1
    watch = Stopwatch(place.device, place.group, layers=layers)
    stack = _build_stack(table)
    cases: dict[Key, Case] = {}
    for candidate in table.options.candidates:
        built, lost = _build(table, candidate, stack, watch)
        emit(lost)
        cases |= {(candidate, i): case for i, case in enumerate(built)}
    last = table.options.warmup + table.options.iterations - 1
    checks: dict[Key, Check] = {}
    series = alternate(
        {key: case.run for key, case in cases.items()},
        range(table.options.warmup, last + 1),
        watch,
        before_each=lambda key: cases[key].clear(),
        after_last=lambda key: checks.update({key: cases[key].check(last)}),
    )
    _abort_on_wrong_work(table, cases, emit)
    measured = {key: _measure(table, case, series[key], checks[key], watch, last) for key, case in cases.items()}
    for candidate in table.options.candidates:
        emit(_rows(table, [found for key, found in measured.items() if key[0] == candidate]))


def _build_stack(table: Table) -> BenchStack | None:
    options = table.options
    if table.level not in STACKED:
        return None
    attention = parse_attention(options.attention, table.setting.shape)
    return BenchStack(table.setting, max(options.micro_batches), options.experts, attention, options.layers)


def _build(
    table: Table, candidate: Candidate, stack: BenchStack | None, watch: Stopwatch
) -> tuple[list[Case], list[Row]]:
    """The warmed-up cases of a dispatcher, and rows that say why others are not there. Collective."""
    cases: list[Case] = []
    lost: list[Row] = []
    for values, make in recipes(table.options, table.level, table.setting, candidate, stack):
        problem: Problem | None = None
        found: list[Case] = []
        try:
            found = [make()]
        except (RecipeError, Unavailable) as err:
            # raised alike on every rank, by agreement inside or because all ranks have the same options
            lost.append(table.row(candidate, status="refused", reason=str(err), **values))
            continue
        except torch.OutOfMemoryError as err:
            problem = ("oom", f"out of memory: {_first_line(err)}")
        problem = agree(problem, table.setting.place) or _warm_up(table.options.warmup, found, watch)
        if problem is None:
            cases += found
        else:
            lost.append(table.row(candidate, status=problem[0], reason=problem[1], **values))
    return cases, lost


def _warm_up(iterations: int, cases: Sequence[Case], watch: Stopwatch) -> Problem | None:
    """The first failure of any rank, None without one.

    The ranks agree after each iteration: a candidate that fails here is no reason to lose the others.
    """
    for case in cases:
        for iteration in range(iterations):
            problem: Problem | None = None
            try:
                case.run(iteration, watch)
            except torch.OutOfMemoryError as err:
                problem = ("oom", f"out of memory: {_first_line(err)}")
            except Unavailable as err:
                problem = ("refused", _first_line(err))
            except MoEError as err:
                problem = ("failed", f"{type(err).__name__}: {_first_line(err)}")
            watch.take()
            found = agree(problem, case.setting.place)
            if found is not None:
                case.clear()
                return found
    return None


def _first_line(err: BaseException) -> str:
    return str(err).splitlines()[0]


def _abort_on_wrong_work(table: Table, cases: dict[Key, Case], emit: Emit) -> None:
    """Raise WrongWork on every rank if a case moved other rows than the routing says on any. Collective."""
    wrong = []
    for (candidate, _), case in cases.items():
        found = agree(("failed", case.mismatches[0]) if case.mismatches else None, table.setting.place)
        if found is not None:
            wrong.append(f"dispatcher '{candidate}': {found[1]}")
            values = {"pass_": case.pass_} | case.row_values()
            emit([table.row(candidate, status="failed", reason=wrong[-1], **values)])
    if wrong:
        raise WrongWork("aborted: " + "; ".join(wrong))


def _measure(table: Table, case: Case, series: Series, check: Check, watch: Stopwatch, iteration: int) -> Measured:
    """What all ranks saw of a case, traced once more. Collective."""
    place, kept = table.setting.place, table.options.trace
    shape = "x".join(str(size) for size in table.setting.shape)
    own = "" if table.options.experts == "torch" else f"-{table.options.experts}"
    path = None if kept is None else kept / trace_file(f"{table.level}-{shape}-{case.label}{own}", place.rank)
    case.clear()
    traced = trace_once(case.run, iteration, watch, path) if case.telling or path is not None else Traced()
    case.clear()
    return measured(case, series, check, traced, place)


def _figure_values(table: Table, figure: Figure, each: Measured, beside: Sequence[Measured]) -> dict[str, Any]:
    case, rates = each.case, table.options.rates
    if not isinstance(case, ReplicaCase):
        return stage_values(figure, each, table.setting, rates)
    whole: Times = {
        other.case.without: other.slowest["layer"]
        for other in beside
        if isinstance(other.case, WholeCase) and (other.case.layer, other.case.pass_) == (case.layer, case.pass_)
    }
    return stage_fields(case, figure, each.slowest, whole, rates)


def _rows(table: Table, found: Sequence[Measured]) -> list[Row]:
    """The rows of a dispatcher's cases, or for each one that says that its results are wrong."""
    rows = []
    for each in found:
        values = each.values() | (domino_values(each, found) if table.level in STACKED else {})
        if each.wrong:
            reason = (
                f"{each.wrong} sampled rows differ from {each.case.reference}, by up to {each.err:.2g} of their norm"
            )
            rows.append(table.row(each.case.candidate, status="failed", reason=reason, **values))
            continue
        for figure in each.case.figures:
            times = _figure_values(table, figure, each, found) | values
            rows.append(table.row(each.case.candidate, status="ok", **times))
    return rows
