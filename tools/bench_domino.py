"""A case of a benchmark that runs one variant of a stack or a step, see `bench_variants`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep.dispatch import Dispatcher
from moe_ep.errors import MoEError, Unavailable
from moe_ep.tracing import step_range

from .bench_candidates import Candidate
from .bench_case import BOTH, Case, Figure, need_grad
from .bench_check import Check, merge_checks
from .bench_stack import BenchStack, Piece
from .bench_stack_check import check_stack, same_gradients, same_rows, sample_gradients
from .bench_variants import Plan
from .timing import Stopwatch, Untimed

STEP = "step"


@contextmanager
def _unheard(dispatcher: Dispatcher) -> Iterator[None]:
    """What fails inside fails on every rank alike: nobody is told, and no group is given up for it."""
    alarm, dispatcher.alarm = dispatcher.alarm, None
    try:
        yield
    finally:
        dispatcher.alarm = alarm


@dataclass(slots=True)
class _Results:
    """What a run left: outputs and input gradients of each piece."""

    ys: list[Tensor]
    dxs: list[Tensor]


class StackCase(Case):
    """One variant of one dispatcher.

    Args:
        stack: the layers, which it shares with the others.
        candidate: the dispatcher with its keys.
        plan: which variant.

    Raises:
        RecipeError, Unavailable: the dispatcher, or a number of reserved SMs, cannot run here, on every rank.
    """

    reference = "the float64 reference, a second run or another variant's gradients"

    def __init__(self, stack: BenchStack, candidate: Candidate, plan: Plan) -> None:
        super().__init__(stack.setting)
        self.stack, self.candidate, self.plan, self.pass_ = stack, candidate, plan, plan.pass_
        self.telling = plan.variant not in ("split", "communication")
        self.backward = plan.pass_ == BOTH
        shape, place = self.setting.shape, self.setting.place
        self.num_tokens = plan.num * shape.T
        tokens, together = self.num_tokens if plan.whole else shape.T, plan.num if plan.interleaved else 1
        self.path = stack.path(candidate, tokens, together, plan.replica)
        self.dispatcher, self.tap = self.path.dispatcher, self.path.tap
        self.all_tokens = self.num_tokens * place.num_ranks
        experts = stack.layers[0].moe.experts
        refusal = experts.reserve_refusal(place.device)
        if plan.reserve_sms and refusal is not None:
            raise Unavailable(f"reserve_sms = {plan.reserve_sms} would have no effect: {refusal}; leave it out")
        declared = 0 if refusal is not None or plan.num == 1 else self.dispatcher.comm_sms
        self.reserved = declared if plan.reserve_sms is None else plan.reserve_sms
        self.figures = [Figure(stage=None, pass_=plan.pass_, form=None, marks=("step",), dispatches=0, combines=0)]
        self.left = _Results([], [])
        self._looked_at: list[Tensor] | None = None  # outputs with their graph, while a run is looked into

    def row_values(self) -> dict[str, Any]:
        """See Case."""
        plan, layer = self.plan, self.stack.layers[0]
        return {
            "M": plan.num, "S": plan.slots, "variant": plan.variant, "layers": len(self.stack.layers),
            "reserve_sms": self.reserved, "attention": self.stack.attention_name, "experts": layer.moe.config.experts,
        }  # fmt: skip

    @property
    def label(self) -> str:
        """See Case."""
        slots = f"-S{self.plan.slots}" if self.plan.slots else ""
        return f"{super().label}-M{self.plan.num}{slots}-{self.plan.variant}-reserve{self.reserved}"

    def clear(self) -> None:
        """Poison and drop what the last run left, gradients too."""
        self.poison(*self.left.ys, *self.left.dxs)
        self.left = _Results([], [])
        self.stack.model.zero_grad(set_to_none=True)

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """Mark "step"."""
        self.clear()
        self.stack.counts.clear()
        pieces = self.stack.pieces(iteration, self.plan.num, self.plan.whole)
        self.stack.use(self.path, self.plan.reserve_sms)
        self.stack.script(pieces)
        self.tap.iteration = iteration
        if self.plan.real:
            self.tap.noting = self.plan.interleaved or self.plan.num == 1
            self._compute(pieces, watch)
            self.tap.noting = False
        else:
            self._apart(pieces, watch)
        self._expect_counts(pieces)

    def _compute(self, pieces: list[Piece], watch: Stopwatch) -> None:
        with torch.set_grad_enabled(self.backward):
            xs = [piece.x.detach().requires_grad_(self.backward) for piece in pieces]
            groups = [range(len(pieces))] if self.plan.interleaved else [range(i, i + 1) for i in range(len(pieces))]
            watch.begin()
            with step_range(self.tap.iteration) if not isinstance(watch, Untimed) else nullcontext():
                ys = [y for group in groups for y in self._group([pieces[i] for i in group], [xs[i] for i in group])]
            watch.mark("step", host_waits=self.dispatcher.host_syncs > 0)
        if self.backward:
            self.left.dxs = [need_grad(x, "the stack", "x") for x in xs]
            for name, parameter in self._trained():
                need_grad(parameter, "the stack", name)
        self.left.ys = [y.detach() for y in ys]

    def _group(self, pieces: list[Piece], xs: list[Tensor]) -> list[Tensor]:
        """Forward of micro-batches together, and one backward for all of them."""
        ys, _ = self.stack.stack(xs)
        if self._looked_at is not None:
            self._looked_at += ys
            for y in ys:
                _ = y.retain_grad() if self.backward else None
        if self.plan.level == STEP:
            losses = [self.stack.loss(y, piece, self.all_tokens) for y, piece in zip(ys, pieces, strict=True)]
            if self.backward:
                torch.stack(losses).sum().backward()
        elif self.backward:
            torch.autograd.backward(ys, [piece.dy for piece in pieces])
        return ys

    def _apart(self, pieces: list[Piece], watch: Stopwatch) -> None:
        """Computation alone; or what it would have sent, prepared by a run that is not timed."""
        alone = self.plan.variant == "compute"
        try:
            with self.tap.silenced(keep=not alone), _unheard(self.dispatcher):
                self._compute(pieces, watch if alone else Untimed())
        except (AssertionError, AttributeError, TypeError) as err:
            self.tap.forget()
            raise Unavailable(
                f"dispatcher '{self.candidate}' cannot compute without its transfers, which leave more than rows "
                f"(places, counts or a handle) that nothing can stand in for: {str(err) or type(err).__name__}"
            ) from err
        if not alone:
            watch.begin()
            with step_range(self.tap.iteration):
                self.tap.send_held_back()
            watch.mark("step")
            self.tap.forget()

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [(n, p) for n, p in self.stack.parameters() if self.plan.level == STEP or not n.startswith("head.")]

    def _expect_counts(self, pieces: list[Piece]) -> None:
        """Every layer's experts got the rows that the routing sends them."""
        first, num_local = self.setting.place.rank * self.setting.num_local, self.setting.num_local
        counts = self.stack.counts.take(first, num_local)
        groups = [pieces] if self.plan.interleaved else [[piece] for piece in pieces]
        wanted = [piece for group in groups for _ in self.stack.layers for piece in group]
        if len(counts) != len(wanted):
            raise MoEError(f"the experts ran {len(counts)} times instead of {len(wanted)}")
        for got, piece in zip(counts, wanted, strict=True):
            self.expect_rows(piece.drawn[0] // self.stack.most, got, self.setting.counts[list(piece.drawn)].sum(0))

    def check(self, iteration: int) -> Check:
        """Look into a run of the same, and hold what was timed against it, and its gradients against other variants'.

        Collective. Nothing to check where rows did not travel.
        """
        if not self.plan.real:
            return Check(wrong=0, err=0.0)
        timed, self.left, self._looked_at = self.left, _Results([], []), []
        for layer in self.stack.layers:
            layer.seen = []
        self.run(iteration, Untimed())
        seen = [layer.seen or [] for layer in self.stack.layers]
        pieces = self.stack.pieces(iteration, self.plan.num, self.plan.whole)
        found = [check_stack(self.stack, pieces, seen, self._looked_at, backward=self.backward)]
        for layer in self.stack.layers:
            layer.seen = None
        self._looked_at = None
        pairs = zip(timed.ys + timed.dxs, self.left.ys + self.left.dxs, strict=True)
        found.append(same_rows(list(pairs), self.setting))
        gradients = sample_gradients(self.stack)
        first = self.stack.gradients.setdefault((self.candidate, self.pass_, self.plan.num), gradients)
        found += [same_gradients(gradients, first, self.setting)] if first else []
        self.left = timed
        return merge_checks(found)
