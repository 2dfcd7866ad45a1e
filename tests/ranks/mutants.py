"""`all2all` with one mistake each, registered under names of their own. `test_mutants.py` shows that each is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_ep.dispatch import Dispatcher, Ticket, find_dispatcher, register_dispatcher
from moe_ep.expert_input import ExpertInput
from moe_ep.routing import Routing

All2All = find_dispatcher("all2all")
# what a broken order of collectives ends in, sooner or later: a wait that is cut short, or ranks that fail
HANGS = "---- rank "
# name -> (a case that must find it, words of the finding)
MUTANTS: dict[str, tuple[str, str]] = {}


def mutant(case: str, words: str) -> Callable[[type[Dispatcher]], type[Dispatcher]]:
    """Register a mutant under its class name, with the case that must find it and what must be said."""

    def register(cls: type[Dispatcher]) -> type[Dispatcher]:
        cls.name = cls.__name__
        MUTANTS[cls.name] = case, words
        return register_dispatcher(cls.name)(cls)

    return register


def with_ids(routing: Routing, ids: Tensor) -> Routing:
    return Routing(expert_ids=ids, weights=routing.weights.nan_to_num(), num_experts=routing.num_experts)


def grouped(inp: ExpertInput, rows: Tensor, weights: Tensor) -> ExpertInput:
    """The same counts over other rows."""
    return replace(inp, source=rows, row_weights=weights, row_index=None, positions=None, capacity=rows.shape[0])


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor - (tensor * (factor - 1)).detach()


# the routing


@mutant("no-route-slots/R2", "tokens_per_expert is")
class CountsMinusOneAsARoute(All2All):
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, x_TH, with_ids(routing, routing.expert_ids.clamp_min(0)))


@mutant("duplicates/R2", "y is wrong")
class MergesDuplicates(All2All):
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        ids = routing.expert_ids.clone()
        for k in range(1, ids.shape[1]):
            ids[:, k].masked_fill_((ids[:, :k] == ids[:, k : k + 1]).any(1), -1)
        super()._dispatch_preprocess(ticket, x_TH, with_ids(routing, ids))


@mutant("uniform/R2", "tokens_per_expert is")
class CountsOffByOneExpert(All2All):
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        counts = inp.tokens_per_expert.roll(1)
        return replace(inp, tokens_per_expert=counts, offsets=torch.cat([inp.offsets[:1], counts.cumsum(0).int()]))


# the weights


@mutant("uniform/R2", "y is wrong")
class AppliesWeightsTwice(All2All):
    weights: WeakKeyDictionary[Ticket, Tensor]

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        self.weights = WeakKeyDictionary({ticket: inp.row_weights})
        return inp

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        super()._combine_preprocess(ticket, (self.weights[ticket][:, None] * y_NH).to(y_NH.dtype))


@mutant("uniform/R2", "d weights")
class LosesTheGradientOfWeights(All2All):
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        return replace(inp, row_weights=inp.row_weights.detach())


@mutant("tiny-weights-bfloat16/R2", "row_weights in the order of the rows")
class RoundsWeightsToBfloat16(All2All):
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        return replace(inp, row_weights=inp.row_weights.bfloat16().float())


@mutant("tiny-weights-bfloat16/R2", "d weights is wrong")
class RoundsTheGradientOfWeightsToBfloat16(All2All):
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        if inp.row_weights.requires_grad:
            inp.row_weights.register_hook(lambda grad: grad.bfloat16().float())
        return inp


# the rows


@mutant("uniform/R2", "rows in the order")
class SwapsTwoRows(All2All):
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        order = torch.arange(inp.capacity)
        order[:2] = order[:2].flip(0)
        return grouped(inp, inp.rows()[order], inp.row_weights)


@mutant("uniform/R2", "y is wrong")
class SwapsTwoReturnedRows(All2All):
    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        order = torch.arange(y_NH.shape[0])
        order[:2] = order[:2].flip(0)
        super()._combine_preprocess(ticket, y_NH[order])


@mutant("uniform/R4", "y is wrong")
class ReturnsRowsInTheOrderOfTheExperts(All2All):
    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        self.pack(ticket, y_NH)


@mutant("uniform/R2", "does not repeat bit for bit")
class ChangesTheOrderOfRowsBetweenRuns(All2All):
    """Every second micro-batch has its rows reversed inside each expert; all results stay right."""

    calls = 0
    order: Tensor

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        self.calls += 1
        bounds = inp.offsets.tolist()
        spans = [torch.arange(low, high) for low, high in itertools.pairwise(bounds)]
        self.order = torch.cat([span.flip(0) if self.calls % 2 == 0 else span for span in spans])
        return grouped(inp, inp.rows()[self.order], inp.row_weights[self.order])

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        super()._combine_preprocess(ticket, y_NH[self.order])


@mutant("no-route-slots/R2", "y is wrong")
class ReadsTheTailInForward(All2All):
    """Two rows of capacity too many, as in runs without a host sync, and a combine that lets them into a product."""

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        rows, weights = inp.rows(), inp.row_weights
        return grouped(
            inp, torch.cat([rows, rows.new_zeros(2, rows.shape[1])]), torch.cat([weights, weights.new_zeros(2)])
        )

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        super()._combine_preprocess(ticket, y_NH[:-2] + 0 * y_NH[-2:].sum(0))


@mutant("no-route-slots/R2", "d x is wrong")
class ReadsTheTailInBackward(All2All):
    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        rows, weights = inp.rows(), inp.row_weights
        return grouped(inp, torch.cat([rows, 0 * rows[:1], 0 * rows[:1]]), torch.cat([weights, weights.new_zeros(2)]))

    def _combine_preprocess(self, ticket: Ticket, y_NH: Tensor) -> None:
        super()._combine_preprocess(ticket, y_NH[:-2])


@mutant("uniform/R2", "does not repeat bit for bit")
class ReadsMemoryThatNobodyWrote(All2All):
    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        y_TH = super()._combine_postprocess(ticket)
        return y_TH + 0 * torch.empty_like(y_TH).nan_to_num(nan=float("inf"), posinf=0.0, neginf=0.0)


@mutant("source-is-kept/R2", "changed while other micro-batches were in flight")
class HandsOutASharedBuffer(All2All):
    buffer: Tensor | None = None

    def _dispatch_postprocess(self, ticket: Ticket) -> ExpertInput:
        inp = super()._dispatch_postprocess(ticket)
        if self.buffer is None:
            self.buffer = torch.zeros(1024, inp.source.shape[1])
        rows = inp.rows()
        shared = self.buffer[: rows.shape[0]]
        shared.copy_(rows.detach())
        return grouped(inp, InPlaceOf.apply(rows, shared), inp.row_weights)


class InPlaceOf(torch.autograd.Function):
    """The values that lie in `shared`, with the gradient of `rows`."""

    @staticmethod
    def forward(ctx: object, rows: Tensor, shared: Tensor) -> Tensor:
        return shared.detach()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# the sums and their gradients


def _sum_in_own_dtype(rows: Tensor, row_index: Tensor, positions: Tensor, **_: object) -> Tensor:
    total = rows.new_zeros(positions.shape[0], rows.shape[1])
    for places in positions.unbind(1):
        total = total + rows[places.clamp_min(0)].masked_fill((places < 0)[:, None], 0)
    return total


@mutant("float32-accumulation/R2", "y is wrong")
class AddsInLowPrecision(All2All):
    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        with mock.patch(f"{All2All.__module__}.sum_rows", _sum_in_own_dtype):
            return super()._combine_postprocess(ticket)


@mutant("uniform/R2", "d x is wrong")
class ScalesGradientsByTheNumberOfRanks(All2All):
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, scale_gradient(x_TH, self.num_ranks), routing)


@mutant("one-local-one-remote-expert/R2", "d x is wrong")
class KeepsOnlyTheLocalGradientOfX(All2All):
    def pack(self, ticket: Ticket, *payload: Tensor) -> None:
        if ticket.stage == 0:
            rows, *others = payload
            expert = ticket.expert_ids.reshape(-1).sort(stable=True).values
            is_local = (expert // self.num_local == self.rank)[:, None]
            payload = (torch.where(is_local, rows, rows.detach()), *others)
        super().pack(ticket, *payload)


@mutant("no-routes-on-a-rank/R2", "y is wrong")
class PassesUnroutedTokensThrough(All2All):
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, x_TH, routing)
        self.extra = x_TH.detach() * (routing.expert_ids < 0).all(1, keepdim=True)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        return super()._combine_postprocess(ticket) + self.extra


# tickets and ranks


@mutant("four-tickets/R2", "")
class KeepsTheStateOfOneMicroBatchOnly(All2All):
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, x_TH, routing)
        self.routes = ticket.state.routes

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        ticket.state = replace(ticket.state, routes=self.routes)
        return super()._combine_postprocess(ticket)


@mutant("abandoned-tickets/R2", "lanes never came back")
class KeepsTicketsForEver(All2All):
    def _dispatch(self, ticket: Ticket) -> None:
        self.__dict__.setdefault("seen", []).append(ticket)
        super()._dispatch(ticket)


@mutant("tensors-are-freed/R2", "x outlived the micro-batch")
class KeepsTheLastInput(All2All):
    def _dispatch_preprocess(self, ticket: Ticket, x_TH: Tensor, routing: Routing) -> None:
        super()._dispatch_preprocess(ticket, x_TH, routing)
        self.last = x_TH


@mutant("stage-out-of-order/R2", "combine where dispatch was due was not refused")
class LetsAStageBeCalledEarly(All2All):
    def combine(self, ticket: Ticket) -> None:
        if ticket.payload and ticket.stage == 1:
            return
        super().combine(ticket)


@mutant("zero-tokens-on-some-ranks/R2", HANGS)
class SkipsTheCollectiveOnAnEmptyRank(All2All):
    def _combine(self, ticket: Ticket) -> None:
        if ticket.num_tokens:
            super()._combine(ticket)

    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        if ticket.num_tokens:
            return super()._combine_postprocess(ticket)
        return torch.zeros(0, self.config.hidden_size, requires_grad=True)


@mutant("zero-tokens-on-some-ranks/R2", HANGS)
class CutsTheGraphOnAnEmptyRank(All2All):
    def _combine_postprocess(self, ticket: Ticket) -> Tensor:
        y_TH = super()._combine_postprocess(ticket)
        return y_TH if ticket.num_tokens else torch.zeros_like(y_TH).requires_grad_()


@mutant("fault-wrong-hidden/R2", HANGS)
class RaisesAlone(All2All):
    def _announce(self, *args: object) -> None:
        pass
