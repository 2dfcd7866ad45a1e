"""Replicas between processes: messages over gloo, and training with them beside training without."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Dispatcher, build_dispatcher
from moe_ep.errors import PlanError
from moe_ep.load import expert_load, imbalance, rank_load
from moe_ep.permute import ExpertInput
from moe_ep.replica import plan, reroute
from moe_ep.replica.transport import GroupTransport, InFlight, Tensors, copies
from moe_ep.replica.with_replicas import SlotBuffers, WithReplicas
from moe_ep.routing import Routing
from moe_ep.testing.ranks import RankPool

E, K, H, T, S, LAYERS = 8, 2, 6, 12, 2, 2
INNER = 5


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def messages(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> None:
    """Weights bit for bit, gradients in their order, whatever a rank has to send."""
    end, num_ranks = GroupTransport(group), group.size()
    load = torch.ones(num_ranks, 2 * num_ranks, dtype=torch.int32)
    load[:, 0] = 60
    made = plan(load, 2)
    assert (int(made.num_replicas()) > 0) == (num_ranks > 1)

    def values(of_rank: int, rows: int, kind: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(of_rank)
        return [torch.randn((rows, *s), generator=generator).to(kind) for s in ((3, 5), (4,))]

    slots = values(100 + rank, 2, dtype)
    before = [t.clone() for t in slots]
    strided = [t.repeat_interleave(2, -1)[..., ::2] for t in values(rank, 2, dtype)]
    end.weight_sync(made, strided, slots).wait()
    mine = {copy.slot: copy for copy in copies(made) if copy.rank == rank}
    for slot in range(2):
        source = values(mine[slot].home, 2, dtype) if slot in mine else before
        place = mine[slot].local if slot in mine else slot
        assert all(torch.equal(a[slot], b[place]) for a, b in zip(slots, source, strict=True))
    totals, parts = values(rank, 2, torch.float32), values(100 + rank, 2, torch.float32)
    expected = [t.clone() for t in totals]
    for copy in copies(made):
        if copy.home == rank:
            for total, part in zip(expected, values(100 + copy.rank, 2, torch.float32), strict=True):
                total[copy.local] += part[copy.slot]
    end.grad_reduce(made, parts, totals).wait()
    assert all(torch.equal(a, b) for a, b in zip(totals, expected, strict=True))
    for slot in range(2):
        assert all(bool(part[slot].any()) == (slot not in mine) for part in parts)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_over_gloo(pool: RankPool, num_ranks: int, dtype: torch.dtype) -> None:
    pool.run(messages, dtype, num_ranks=num_ranks)


def disagreement(group: dist.ProcessGroup, rank: int) -> str:
    load = torch.ones(4, 8, dtype=torch.int32)
    load[0, 0] = 50 + (rank == 3)
    try:
        GroupTransport(group).agree(plan(load, 2))
    except PlanError as err:
        return str(err)
    return "no error"


def test_a_plan_that_differs_is_an_error_on_every_rank(pool: RankPool) -> None:
    said = pool.run(disagreement)
    assert len(set(said)) == 1
    assert said[0].startswith(
        "the replica plans of ranks [3] differ from rank 0's; all ranks must plan from the same load"
    )


@dataclass
class Layer:
    """One rank's parameters of a layer: router over all experts (a copy on every rank), its own experts."""

    router_EH: Tensor
    up_LIH: Tensor
    down_LHI: Tensor

    @property
    def masters(self) -> list[Tensor]:
        return [self.up_LIH, self.down_LHI]

    @property
    def parameters(self) -> list[Tensor]:
        return [self.router_EH, *self.masters]


def make_layers(rank: int, num_ranks: int) -> list[Layer]:
    generator = torch.Generator().manual_seed(1)
    own = slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
    layers = []
    for _ in range(LAYERS):
        router, up, down = (
            torch.randn(shape, generator=generator) / 2 for shape in ((E, H), (E, INNER, H), (E, H, INNER))
        )
        layers.append(Layer(router, up[own].clone(), down[own].clone()))
    for layer in layers:
        for parameter in layer.parameters:
            parameter.requires_grad_()
    return layers


def experts(inp: ExpertInput, groups: list[tuple[Tensor, ...]]) -> Tensor:
    """One expert after the other, straight from masters and slots, so that autograd keeps the slots themselves."""
    rows, ends = inp.rows(), inp.offsets.tolist()
    weights = [(up[n], down[n]) for up, down in groups for n in range(len(up))]
    parts = [
        torch.tanh(rows[begin:end] @ up.T) @ down.T * inp.row_weights[begin:end, None]
        for (begin, end), (up, down) in zip(itertools.pairwise(ends), weights, strict=True)
    ]
    return torch.cat(parts)


class NotReduced(GroupTransport):
    """A mutant: gradients of replicas stay where they are."""

    def _pull(self, plan: Any, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        return InFlight(lambda: None)


class TwiceReduced(GroupTransport):
    """A mutant: the owner of a slot forgets to zero it, and what is in it is added again."""

    def _pull(self, plan: Any, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        for _ in range(2):
            kept = [grad.clone() for grad in slot_grads]
            super()._pull(plan, kept, master_grads).wait()
        return InFlight(lambda: None)


@dataclass
class Step:
    loss: float
    grads: list[Tensor]
    replicas: list[int]
    rows: list[int]
    before: list[float]
    after: list[float]


class Run:
    """Training on one rank, with S slots or with none."""

    def __init__(self, group: dist.ProcessGroup, rank: int, name: str, slots: int, mutant: str) -> None:
        self.group, self.rank, self.slots, self.mutant = group, rank, slots, mutant
        self.num_ranks = group.size()
        transports = {"not reduced": NotReduced, "reduced twice": TwiceReduced}
        self.transport = transports.get(mutant, GroupTransport)(group)
        physical = E + self.num_ranks * slots
        config = DispatchConfig(name=name, num_experts=physical, top_k=K, hidden_size=H, max_tokens=T)
        self.dispatcher: Dispatcher = build_dispatcher(config, group)
        self.layers = make_layers(rank, self.num_ranks)
        self.buffers = SlotBuffers(slots, self.layers[0].masters)  # shared by all layers

    def layer(self, number: int, x_TH: Tensor, bias_E: Tensor, step: Step) -> Tensor:
        layer = self.layers[number]
        replicas = WithReplicas(self.transport, self.buffers, layer.masters) if self.slots else None
        logits = x_TH @ layer.router_EH.T + bias_E
        ids = logits.detach().topk(K).indices
        routing = Routing(expert_ids=ids, weights=logits.gather(1, ids).softmax(1), num_experts=E)
        groups = [tuple(layer.masters)]
        if replicas is not None:
            loads = [torch.empty(E, dtype=torch.int64) for _ in range(self.num_ranks)]
            dist.all_gather(loads, expert_load(ids, E), group=self.group)
            made = plan(torch.stack(loads), self.slots)
            self.transport.agree(made)
            replicas.sync(made)
            routing = reroute(routing, made, self.rank)
            self._note(step, made)
        ticket = self.dispatcher.dispatch_preprocess(x_TH, routing, layer=number, micro_batch=0)
        self.dispatcher.dispatch(ticket)
        if replicas is not None:
            groups = list(replicas.take())
        y = experts(self.dispatcher.dispatch_postprocess(ticket), groups)
        if replicas is not None and self.mutant != "not brought again":
            y = replicas.again(y)
        self.dispatcher.combine_preprocess(ticket, y)
        self.dispatcher.combine(ticket)
        return x_TH + self.dispatcher.combine_postprocess(ticket)

    def _note(self, step: Step, made: Any) -> None:
        mine = [copy for copy in copies(made) if copy.rank == self.rank]
        step.replicas.append(int(made.num_replicas()))
        step.rows.append(sum(int(made.quota[c.home * made.num_local + c.local, c.rank]) for c in mine))
        step.before.append(float(imbalance(rank_load(made.load.long().sum(0), self.num_ranks))))
        step.after.append(float(imbalance(made.rank_load())))

    def step(self, number: int) -> Step:
        """One SGD step; popular experts move from step to step."""
        generator = torch.Generator().manual_seed(1000 + number * 10 + self.rank)
        x_TH, target_TH = (torch.randn(T, H, generator=generator) for _ in range(2))
        bias_E = torch.zeros(E).index_fill_(0, torch.tensor([number % E, (3 * number + 1) % E]), 2.0)
        step = Step(0.0, [], [], [], [], [])
        h = x_TH
        for layer in range(LAYERS):
            h = self.layer(layer, h, bias_E, step)
        loss = (h - target_TH).square().sum() / (T * self.num_ranks)
        loss.backward()
        with torch.no_grad():
            total = loss.detach().clone()
            dist.all_reduce(total, group=self.group)
            step.loss = float(total)
            for layer_ in self.layers:
                dist.all_reduce(layer_.router_EH.grad, group=self.group)
                for parameter in layer_.parameters:
                    step.grads.append(parameter.grad.clone())
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        return step


def train(group: dist.ProcessGroup, rank: int, name: str, slots: int, steps: int, mutant: str = "") -> list[Any]:
    run = Run(group, rank, name, slots, mutant)
    return [dataclasses.astuple(run.step(number)) for number in range(steps)]


def largest_difference(ours: list[list[Any]], theirs: list[list[Any]]) -> float:
    """Of losses and gradients, relative to the largest entry of each gradient."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            worst = max(worst, abs(a[0] - b[0]) / abs(b[0]))
            for grad, reference in zip(a[1], b[1], strict=True):
                worst = max(worst, float((grad - reference).abs().max() / reference.abs().max()))
    return worst


@pytest.mark.parametrize("name", ["all2all", "agrs"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_with_replicas_equals_training_without(pool: RankPool, name: str, num_ranks: int) -> None:
    ours = pool.run(train, name, S, 20, num_ranks=num_ranks)
    theirs = pool.run(train, name, 0, 20, num_ranks=num_ranks)
    assert largest_difference(ours, theirs) < 1e-5
    _, _, replicas, _, before, after = (list(values) for values in zip(*ours[0], strict=True))
    assert sum(min(layers) > 0 for layers in replicas) >= 0.9 * 20
    for number, layers in enumerate(replicas):
        rows = [sum(rank[number][3][layer] for rank in ours) for layer in range(LAYERS)]
        assert all((count > 0) == (copies > 0) for count, copies in zip(rows, layers, strict=True))
    flat = [(b, a) for bs, as_ in zip(before, after, strict=True) for b, a in zip(bs, as_, strict=True)]
    assert all(a <= b for b, a in flat)
    assert sum(a for _, a in flat) / len(flat) < 1.05 < 1.3 < sum(b for b, _ in flat) / len(flat)


@pytest.mark.parametrize("mutant", ["not reduced", "reduced twice", "not brought again"])
def test_what_is_left_out_shows(pool: RankPool, mutant: str) -> None:
    theirs = pool.run(train, "all2all", 0, 4, num_ranks=2)
    assert largest_difference(pool.run(train, "all2all", S, 4, mutant, num_ranks=2), theirs) > 1e-3


def evaluate(group: dist.ProcessGroup, rank: int) -> tuple[float, float]:
    """A forward without gradients, then a training step, on the same buffers."""
    run, plain = Run(group, rank, "all2all", S, ""), Run(group, rank, "all2all", 0, "")
    x_TH, step = torch.randn(T, H, generator=torch.Generator().manual_seed(rank)), Step(0.0, [], [], [], [], [])
    bias_E = torch.zeros(E).index_fill_(0, torch.tensor([1]), 2.0)
    with torch.no_grad():
        outputs = [r.layer(0, x_TH, bias_E, step) for r in (run, plain)]
    assert not outputs[0].requires_grad
    assert step.replicas[0] > 0
    return float((outputs[0] - outputs[1]).abs().max()), run.step(0).loss


def test_evaluation_between_steps(pool: RankPool) -> None:
    results = pool.run(evaluate, num_ranks=2)
    first = pool.run(train, "all2all", S, 1, num_ranks=2)
    for rank, (difference, loss) in enumerate(results):
        assert difference < 1e-6
        assert loss == first[rank][0][0]
