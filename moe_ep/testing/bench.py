"""One dispatcher under test on one rank: micro-batches stage by stage, and what they produced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dispatch import Dispatcher, Ticket
from ..expert_input import ExpertInput
from ..routing import Routing
from .cases import LAYER, Case, Layout, make_experts, make_input
from .expert_rows import expert_rows


@dataclass(kw_only=True)
class Pass:
    """What one micro-batch produced on one rank, on the CPU; None: not asked for."""

    micro_batch: int
    rows: dict[str, Any] = field(default_factory=dict)
    y: Tensor | None = None
    dx: Tensor | None = None
    dweights: Tensor | None = None
    dparams: tuple[Tensor, ...] | None = None


@dataclass(kw_only=True)
class Report:
    """What one rank did in a case.

    `refusal`: why the dispatcher could not be built, or refused the first micro-batch. `repeats`: whether it promises
    the same bits again.
    """

    passes: list[Pass] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refusal: str | None = None
    repeats: bool = True


class Bench:
    """One dispatcher under test on one rank, with the case's inputs."""

    def __init__(self, case: Case, dispatcher: Dispatcher, rank: int, device: torch.device) -> None:
        self.case, self.dispatcher, self.rank, self.device = case, dispatcher, rank, device
        self.report = Report(repeats=dispatcher.capabilities.deterministic)
        num_local = case.num_experts // case.num_ranks
        self.first_expert = rank * num_local
        mine = slice(self.first_expert, self.first_expert + num_local)
        self.params = tuple(p[mine].clone().to(device) for p in make_experts(case).params())

    def micro_batch(self, index: int) -> MicroBatch:
        """The tensors of one micro-batch."""
        return MicroBatch(self, index)


class MicroBatch:
    """One micro-batch on its way: leaves that want gradients, views of them as the case asks, the ticket."""

    def __init__(self, bench: Bench, index: int) -> None:
        case, device = bench.case, bench.device
        self.bench, self.index = bench, index
        data = make_input(case, index, bench.rank)
        leaves = case.grads == "all" or (case.grads == "first_rank" and bench.rank == 0)
        self.x = data.x.to(device).requires_grad_(leaves or case.grads == "x")
        self.weights = data.weights.to(device).requires_grad_(leaves or case.grads == "weights")
        self.ids = data.expert_ids.to(device)
        self.params = tuple(p.clone().requires_grad_(case.grads != "none") for p in bench.params)
        self.dy = data.dy.to(device)
        self.num_experts = case.num_experts
        self.bad_tokens: Tensor | None = None
        self.result = Pass(micro_batch=index)
        self.ticket: Ticket
        self.y: Tensor

    def preprocess(self) -> None:
        """Stage 1, with the layout's numbers."""
        layout = self.bench.case.x_layout
        routing = Routing(
            expert_ids=lay_out(self.ids, layout),
            weights=lay_out(self.weights, layout),
            num_experts=self.num_experts,
            bad_tokens=self.bad_tokens,
        )
        dispatcher = self.bench.dispatcher
        x_TH = lay_out(self.x, layout)
        self.ticket = dispatcher.dispatch_preprocess(x_TH, routing, layer=LAYER, micro_batch=self.index)
        stats = self.ticket.layout_stats()
        self.result.rows["stats"] = [int(getattr(stats, name)) for name in stats.__slots__]

    def dispatch(self) -> None:
        """Stage 2."""
        self.bench.dispatcher.dispatch(self.ticket)

    def receive(self) -> ExpertInput:
        """Stage 3; keeps a copy of what the experts see."""
        inp = self.bench.dispatcher.dispatch_postprocess(self.ticket)
        self.result.rows |= snapshot(inp)
        return inp

    def compute(self, inp: ExpertInput) -> None:
        """The experts, and stage 4."""
        y_NH = lay_out(expert_rows(inp, self.params, self.bench.first_expert), self.bench.case.x_layout)
        self.bench.dispatcher.combine_preprocess(self.ticket, y_NH)

    def experts(self) -> None:
        """Stage 3, the experts, stage 4."""
        self.compute(self.receive())

    def combine(self) -> None:
        """Stage 5."""
        self.bench.dispatcher.combine(self.ticket)

    def finish(self) -> None:
        """Stage 6; keeps y."""
        self.y = self.bench.dispatcher.combine_postprocess(self.ticket)
        self.result.y = self.y.detach().cpu()

    def forward(self) -> MicroBatch:
        """All six stages."""
        with torch.set_grad_enabled(self.bench.case.grads != "none"):
            for stage in (self.preprocess, self.dispatch, self.experts, self.combine, self.finish):
                stage()
        return self

    def gradient(self) -> Tensor:
        """The gradient that arrives at y, as the case lays it out."""
        kind = self.bench.case.dy_layout
        if kind == "expanded":
            return self.dy.new_ones(()).expand(self.dy.shape)
        return self.dy.t().contiguous().t() if kind == "transposed" else self.dy

    def backward(self) -> None:
        """Backward of y alone, unless the case asks for no gradient."""
        if self.bench.case.grads != "none":
            self.y.backward(self.gradient())

    def record(self) -> None:
        """Add the pass to the report, with the gradients as they are now."""
        result = self.result
        result.dx, result.dweights = (None if t.grad is None else t.grad.cpu() for t in (self.x, self.weights))
        if self.bench.case.grads != "none":
            result.dparams = tuple(torch.zeros(0) if p.grad is None else p.grad.cpu() for p in self.params)
        self.bench.report.passes.append(result)

    def run(self) -> None:
        """Forward, backward, record."""
        self.forward()
        self.backward()
        self.record()


def lay_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The same values as a transposed view, as a slice with a storage offset, or as they are."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    return pad(tensor, (2, 1, 1, 1))[1:-1, 2:-1] if layout == "slice" else tensor


def snapshot(inp: ExpertInput) -> dict[str, Any]:
    """What the experts see, without the tail."""
    offsets = inp.offsets.tolist()
    with torch.no_grad():
        return {
            # clones: a view of what a back end hands over as it is would keep its whole graph
            "rows": inp.rows()[: offsets[-1]].clone().cpu(),
            "weights": inp.row_weights[: offsets[-1]].clone().cpu(),
            "offsets": offsets,
            "counts": inp.tokens_per_expert.tolist(),
            "capacity": (inp.capacity, inp.rows().shape[0], inp.row_weights.shape[0]),
            "host_counts": None if inp.host_counts is None else list(inp.host_counts),
            "int_dtypes": {
                name: tensor.dtype
                for name in ("offsets", "tokens_per_expert", "row_index", "positions")
                if (tensor := getattr(inp, name)) is not None
            },
        }
