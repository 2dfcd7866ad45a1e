"""Candidates of a benchmark: what each has to offer, and the one that runs a dispatcher's stages without experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Ticket, build_dispatcher
from moe_ep.errors import MoEError
from moe_ep.expert_input import ExpertInput
from moe_ep.routing import Routing

from .bench_candidates import Candidate
from .bench_check import Check, check_stages, constant_factors
from .bench_setting import Setting
from .floors import Form, Rates, combine_floor, dispatch_floor, slowest_us
from .rows import dtype_name
from .timing import Stopwatch

FWD, BOTH = "fwd", "fwd+bwd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row's worth of a case: the marks whose times add up to it, and how many trips of all rows they hold.

    Attributes:
        stage, pass_, form: as in a row.
        marks: summed within an iteration, after the slowest rank of each was taken.
        dispatches, combines: transfers of that kind in it, a backward counting as its transpose.
    """

    stage: str | None
    pass_: str
    form: Form | None
    marks: tuple[str, ...]
    dispatches: int
    combines: int

    def floor_us(self, setting: Setting, rates: Rates) -> float | None:
        """Mean over the iterations of the slowest rank's floor; None for a layer, whose GEMMs have none here."""
        if self.form is None:
            return None
        row_bytes, form = setting.row_bytes, self.form
        there = [slowest_us([dispatch_floor(t, row_bytes, form, rates) for t in ranks]) for ranks in setting.traffic]
        back = [slowest_us([combine_floor(t, row_bytes, rates) for t in ranks]) for ranks in setting.traffic]
        return (self.dispatches * sum(there) + self.combines * sum(back)) / len(setting.traffic)


class Case(ABC):
    """One candidate; all ranks call its methods alike.

    Attributes:
        candidate: the dispatcher with its keys.
        pass_: as in a row.
        figures: one for each row.
        reference: what `check` holds its results against.
        telling: whether a trace of it says anything that its row has a field for.
    """

    candidate: Candidate
    pass_: str
    figures: list[Figure]
    reference = "the float64 reference"
    telling = True

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.mismatches: list[str] = []

    @property
    def label(self) -> str:
        """Of a trace's file: dispatcher, pass and what else tells the candidates of a table apart."""
        return f"{self.candidate}-{self.pass_}"

    def row_values(self) -> dict[str, Any]:
        """Fields of its rows that only it knows."""
        return {}

    @abstractmethod
    def clear(self) -> None:
        """Poison and drop what the last iteration left. `run` does it first; before it nothing is left to drop."""

    @abstractmethod
    def run(self, iteration: int, watch: Stopwatch) -> None:
        """One iteration with its marks; counts rows after."""

    @abstractmethod
    def check(self, iteration: int) -> Check:
        """Compare the results of the last `run`, which was this iteration, with the reference. Collective."""

    def expect_rows(self, iteration: int, tokens_per_expert: Tensor, want: Tensor | None = None) -> None:
        """Note it if an expert of this rank got other rows than the routing says (read behind the marks)."""
        got, want = tokens_per_expert.long().cpu(), self.setting.counts[iteration] if want is None else want
        if not torch.equal(got, want):
            self.mismatches.append(
                f"iteration {iteration}: the experts of rank {self.setting.place.rank} got {int(got.sum())} rows, the "
                f"routing sends them {int(want.sum())}; it moved other work than it claims, so its times mean nothing"
            )

    def poison(self, *tensors: Tensor | None) -> None:
        """Fill an earlier iteration's results with NaN before their memory is handed out again.

        Inputs are left alone: a dispatcher of one rank may hand over x itself.
        """
        kept = {t.untyped_storage().data_ptr() for t in (self.setting.x, self.setting.dy)}
        for tensor in tensors:
            if tensor is not None and tensor.untyped_storage().data_ptr() not in kept:
                tensor.detach().fill_(float("nan"))


class StageCase(Case):
    """The six stages of a dispatcher, without experts; in "fwd+bwd" each half's backward on its own.

    The graph is cut between dispatch and combine, where constant experts stand that are not timed.
    """

    def __init__(self, candidate: Candidate, pass_: str, setting: Setting) -> None:
        super().__init__(setting)
        self.candidate, self.pass_ = candidate, pass_
        shape = setting.shape
        config = DispatchConfig(
            name=candidate.name, num_experts=shape.E, top_k=shape.K, hidden_size=shape.H,
            dtype=dtype_name(setting.dtype), max_tokens=shape.T, **{"kernels": setting.kernels} | candidate.values,
        )  # fmt: skip
        self.dispatcher = build_dispatcher(config, setting.place.group)
        self.backward = pass_ == BOTH
        self.figures = _stage_figures(pass_)
        self._left: tuple[Tensor | None, ...] = ()
        self._y: Tensor | None = None
        self._grads: tuple[Tensor, Tensor] | None = None

    def clear(self) -> None:
        """See Case."""
        self.poison(*self._left, self._y, *(self._grads or ()))
        self._left, self._y, self._grads = (), None, None

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """Marks dispatch_unique, dispatch_expanded, combine, and combine_bwd, dispatch_bwd."""
        self.clear()
        drawn = self.setting.routings[iteration]
        x_TH = self.setting.x.detach().requires_grad_(self.backward)
        weights_TK = drawn.weights.detach().requires_grad_(self.backward)
        routing = Routing(expert_ids=drawn.expert_ids, weights=weights_TK, num_experts=drawn.num_experts)
        with torch.set_grad_enabled(self.backward):
            inp, rows_NH, ticket = self._dispatch(x_TH, routing, watch)
            self.expect_rows(iteration, inp.tokens_per_expert)
            first_expert = self.setting.place.rank * self.setting.num_local
            factors_N = constant_factors(inp, first_expert, self.setting.shape.E)
            scale_N = (factors_N * inp.row_weights.detach()).unsqueeze(-1)
            out_NH = (rows_NH.detach() * scale_N).to(rows_NH.dtype).requires_grad_(self.backward)
            y_TH = self._combine(ticket, out_NH, watch)
        if self.backward:
            self._run_backward(y_TH, out_NH, rows_NH, inp, factors_N, watch)
            self._grads = (need_grad(x_TH, "dispatch", "x"), need_grad(weights_TK, "dispatch", "the routing weights"))
        self._left = (inp.source, rows_NH, out_NH, out_NH.grad)
        self._y = y_TH.detach()

    def _dispatch(self, x_TH: Tensor, routing: Routing, watch: Stopwatch) -> tuple[ExpertInput, Tensor, Ticket]:
        d = self.dispatcher
        watch.begin()
        ticket = d.dispatch_preprocess(x_TH, routing)
        d.dispatch(ticket)
        inp = d.dispatch_postprocess(ticket)
        watch.mark("dispatch_unique")
        rows_NH = inp.rows()
        watch.mark("dispatch_expanded")
        return inp, rows_NH, ticket

    def _combine(self, ticket: Ticket, out_NH: Tensor, watch: Stopwatch) -> Tensor:
        d = self.dispatcher
        watch.begin()
        d.combine_preprocess(ticket, out_NH)
        d.combine(ticket)
        y_TH = d.combine_postprocess(ticket)
        watch.mark("combine")
        return y_TH

    def _run_backward(
        self, y_TH: Tensor, out_NH: Tensor, rows_NH: Tensor, inp: ExpertInput, factors_N: Tensor, watch: Stopwatch
    ) -> None:
        for tensor, what in ((y_TH, "combine's output"), (rows_NH, "expert rows"), (inp.row_weights, "row weights")):
            if not tensor.requires_grad:
                raise MoEError(f"the dispatcher cut the graph: {what} do not require a gradient")
        watch.begin()
        y_TH.backward(self.setting.dy)
        watch.mark("combine_bwd")
        dout_NH = need_grad(out_NH, "combine", "the experts' output")
        drows_NH = (dout_NH * factors_N.unsqueeze(-1)).to(rows_NH.dtype)
        watch.begin()
        torch.autograd.backward([rows_NH, inp.row_weights], [drows_NH, factors_N])
        watch.mark("dispatch_bwd")

    def check(self, iteration: int) -> Check:
        """See check_stages."""
        assert self._y is not None, "check before run"
        return check_stages(self.setting, iteration, self._y, self._grads)


def need_grad(tensor: Tensor, whose: str, what: str) -> Tensor:
    """The gradient of a leaf.

    Raises:
        MoEError: there is none.
    """
    if tensor.grad is None:
        raise MoEError(f"the backward of {whose} gave {what} no gradient")
    return tensor.grad


def _stage_figures(pass_: str) -> list[Figure]:
    def figure(stage: str, form: Form, marks: tuple[str, ...], dispatches: int, combines: int) -> Figure:
        return Figure(stage=stage, pass_=pass_, form=form, marks=marks, dispatches=dispatches, combines=combines)

    if pass_ == FWD:
        return [
            figure("dispatch", "unique", ("dispatch_unique",), 1, 0),
            figure("dispatch", "expanded", ("dispatch_expanded",), 1, 0),
            figure("combine", "expanded", ("combine",), 0, 1),
            figure("dispatch+combine", "expanded", ("dispatch_expanded", "combine"), 1, 1),
        ]
    there, back = ("dispatch_expanded", "dispatch_bwd"), ("combine", "combine_bwd")
    return [
        figure("dispatch", "expanded", there, 1, 1),
        figure("combine", "expanded", back, 1, 1),
        figure("dispatch+combine", "expanded", there + back, 2, 2),
    ]
