"""Compares what the ranks report with the oracle and with an enumeration of the routes, in the parent process.

Bounds. Constant experts on small whole numbers must give the float64 value rounded once. The other experts compute in
float64 and round each row once, so a result y = sum_k w f differs from the oracle by: a row's rounding, a rounding of
each rank's partial sum (back ends that reduce before the trip), the last rounding, each at most u(dtype) * sum_k |w f|,
and at most K + R float32 additions. The same holds for d x. The rows, weights and gradients that travel unchanged are
compared bit for bit, and the experts' parameter gradients, computed from them in float64, must therefore agree to
float64 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .bench import Pass, Report
from .cases import Case, make_experts, make_inputs
from .oracle import OracleResult, RankInput, run_oracle

_UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_TINY = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def judge(case: Case, reports: Sequence[Report]) -> list[str]:
    """Everything that is wrong, one sentence each, with rank and micro-batch; empty: the contract is kept."""
    problems = [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report.problems]
    if not all(report.passes for report in reports):
        return problems if problems else ["no rank finished a micro-batch"]
    experts = make_experts(case)
    truth: dict[int, tuple[list[RankInput], OracleResult]] = {}
    for index in {one.micro_batch for one in reports[0].passes}:
        inputs = make_inputs(case, index)
        truth[index] = inputs, run_oracle(inputs, experts)
    for rank, report in enumerate(reports):
        seen: dict[int, Pass] = {}
        for number, one in enumerate(report.passes):
            where = f"rank {rank}, micro-batch {one.micro_batch}, pass {number}"
            inputs, oracle = truth[one.micro_batch]
            found = [*_judge_rows(case, rank, one, inputs), *_judge_values(case, rank, one, oracle)]
            first = seen.setdefault(one.micro_batch, one)
            found += _differences(first, one) if report.repeats and first is not one else []
            problems += [f"{where}: {text}" for text in found]
    return problems


def routes_to(inputs: Sequence[RankInput], expert: int) -> Iterator[tuple[int, int, int]]:
    """(source rank, token, k) of every route to one expert, in the documented order of rows."""
    for source, data in enumerate(inputs):
        for t, k in (data.expert_ids == expert).nonzero().tolist():
            yield source, t, k


def _judge_rows(case: Case, rank: int, one: Pass, inputs: Sequence[RankInput]) -> Iterator[str]:
    """The ExpertInput against an enumeration: grouping, order, counts, offsets, weights, LayoutStats."""
    num_local = case.num_experts // case.num_ranks
    routes = [list(routes_to(inputs, rank * num_local + local)) for local in range(num_local)]
    flat = [route for group in routes for route in group]
    counts = [len(group) for group in routes]
    rows = torch.stack([inputs[s].x[t] for s, t, _ in flat]) if flat else inputs[rank].x.new_zeros(0, case.hidden)
    weights = torch.tensor([inputs[s].weights[t, k] for s, t, k in flat], dtype=torch.float32)
    got = one.rows
    if got["counts"] != counts:
        yield f"tokens_per_expert is {got['counts']}, not {counts}"
    if got["host_counts"] not in (None, counts):
        yield f"host_counts is {got['host_counts']}, not {counts}"
    if got["offsets"] != [sum(counts[:i]) for i in range(num_local + 1)]:
        yield f"offsets are {got['offsets']} for counts {counts}"
    for name, dtype in got["int_dtypes"].items():
        if dtype != torch.int32:
            yield f"{name} is {dtype}, not int32"
    if len(set(got["capacity"])) != 1 or got["capacity"][0] < len(flat):
        yield f"capacity, rows and row_weights have lengths {got['capacity']} for {len(flat)} rows"
    yield from _same("rows in the order (expert, source rank, token, k)", got["rows"], rows)
    yield from _same("row_weights in the order of the rows", got["weights"], weights)
    wanted = layout_of(inputs[rank].expert_ids, rank, num_local, case.hidden * inputs[rank].x.element_size())
    if got["stats"] != wanted:
        yield f"LayoutStats are {got['stats']}, not {wanted}"


def layout_of(ids_TK: Tensor, rank: int, num_local: int, row_bytes: int) -> list[int]:
    """[routes, cross_rank_routes, messages, route_bytes, dedup_bytes] by enumeration."""
    owners = [[e // num_local for e in row if e >= 0] for row in ids_TK.tolist()]
    routes = sum(map(len, owners))
    cross = sum(owner != rank for row in owners for owner in row)
    messages = [owner for row in owners for owner in set(row)]
    return [routes, cross, len(messages), routes * row_bytes, sum(m != rank for m in messages) * row_bytes]


def _judge_values(case: Case, rank: int, one: Pass, oracle: OracleResult) -> Iterator[str]:
    """y and every gradient against the oracle."""
    asked = {"all": (True, True), "x": (True, False), "weights": (False, True), "none": (False, False)}
    wants_x, wants_weights = asked.get(case.grads, (rank == 0, rank == 0))
    dtype = getattr(torch, case.dtype)
    yield from _close("y", one.y, oracle.y[rank], dtype, _bound(case, oracle.y_abs[rank]))
    if wants_x:
        yield from _close("d x", one.dx, oracle.dx[rank], dtype, _bound(case, oracle.dx_abs[rank]))
    elif one.dx is not None:
        yield "d x came although x asked for none"
    if wants_weights:
        # <dy, f> is rounded to float32 once; where a slot has no route the gradient is exactly zero
        bound = 1.01 * _UNIT["float32"] * oracle.dweights[rank].abs() + 1e-12 * (oracle.dweights[rank] != 0)
        yield from _close("d weights", one.dweights, oracle.dweights[rank], torch.float32, bound)
    if case.grads == "none":
        return
    num_local = case.num_experts // case.num_ranks
    mine = slice(rank * num_local, (rank + 1) * num_local)
    for got, full in zip(one.dparams or (), oracle.dparams, strict=True):
        bound = torch.full_like(full[mine], 1e-11) * full.abs().amax() * (full[mine] != 0)
        yield from _close("d expert parameters", got, full[mine], torch.float64, bound)


def _bound(case: Case, absolute_sum: Tensor) -> Tensor:
    if case.experts == "constant" and case.exact:
        return torch.zeros_like(absolute_sum)
    addition = _UNIT["float64" if case.dtype == "float64" else "float32"]
    relative = 3.03 * _UNIT[case.dtype] + (case.top_k + case.num_ranks) * addition
    # the suite's experts and the oracle add in different orders, both in float64
    order = 100 * _UNIT["float64"] * absolute_sum.amax() if absolute_sum.numel() else 0.0
    return relative * absolute_sum + (3 * _TINY[case.dtype] + order) * (absolute_sum != 0)


def _close(what: str, got: Any, wanted: Tensor, dtype: torch.dtype, bound: Tensor) -> Iterator[str]:
    if got is None:
        yield f"{what} is missing"
    elif got.dtype != dtype or got.shape != wanted.shape:
        yield f"{what} is {got.dtype} {tuple(got.shape)}, not {dtype} {tuple(wanted.shape)}"
    else:
        exact = not bound.any()  # then what is demanded is the float64 value rounded once
        error = (got.double() - (wanted.to(dtype).double() if exact else wanted)).abs()
        bad = ~(error <= bound)  # a NaN is bad
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            yield (
                f"{what} is wrong in {int(bad.sum())} of {bad.numel()} places, first at {at}: "
                f"{got[at].item():.9g}, not {wanted[at].item():.9g} (bound {bound[at].item():.3g})"
            )


def _same(what: str, got: Tensor, wanted: Tensor) -> Iterator[str]:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        yield f"{what}: {got.dtype} {tuple(got.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    elif not torch.equal(got, wanted):
        bad = (got != wanted).flatten(1).any(1) if got.dim() > 1 else got != wanted
        yield f"{what}: {int(bad.sum())} of {len(bad)} differ, first at {int(bad.nonzero()[0])}"


def _differences(first: Pass, again: Pass) -> list[str]:
    """What does not repeat bit for bit between two passes of one micro-batch."""
    pairs = [(name, getattr(first, name), getattr(again, name)) for name in ("y", "dx", "dweights")]
    pairs += [("d expert parameters", a, b) for a, b in zip(first.dparams or (), again.dparams or (), strict=True)]
    pairs += [(name, first.rows[name], again.rows[name]) for name in ("rows", "weights")]
    return [
        f"{name} does not repeat bit for bit"
        for name, a, b in pairs
        if isinstance(a, Tensor) and not (isinstance(b, Tensor) and torch.equal(a, b))
    ]
