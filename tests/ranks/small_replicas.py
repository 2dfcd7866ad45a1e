"""Training of two MoE layers with replicas, on one rank: SGD, popular experts that move, slots shared by the layers.

Experts run one after the other, straight from masters and slots, so that autograd keeps the slots themselves.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Dispatcher, build_dispatcher
from moe_ep.expert_input import ExpertInput
from moe_ep.load import expert_load, imbalance, rank_load
from moe_ep.replica import Plan, plan, reroute
from moe_ep.replica.lanes import SlotLane
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.transport import InFlight, SlotBuffers, Tensors, copies
from moe_ep.replica.with_replicas import WithReplicas
from moe_ep.routing import NO_ROUTE, Routing

E, K, H, T, S, LAYERS = 8, 2, 6, 12, 2, 2
INNER = 5
RATE = 0.05


@dataclass
class Step:
    """What one step came to: per layer replicas, rows on this rank's replicas, rank imbalance before and after."""

    loss: float = 0.0
    grads: list[Tensor] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    copies_equal: bool = True


class NotReduced(GroupTransport):
    """A mutant: gradients of replicas stay where they are."""

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        return InFlight(lambda: None)


class TwiceReduced(GroupTransport):
    """A mutant: what is in the slots is added twice."""

    def _pull(self, plan: Plan, slot_grads: Tensors, master_grads: Tensors) -> InFlight:
        super()._pull(plan, [grad.clone() for grad in slot_grads], master_grads).wait()
        return super()._pull(plan, slot_grads, master_grads)


class Layer(nn.Module):
    """Router over all experts (a copy on every rank) and the experts of this rank."""

    def __init__(self, number: int, rank: int, num_ranks: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        router, up, down = (
            torch.randn(shape, generator=generator) / 2 for shape in ((E, H), (E, INNER, H), (E, H, INNER))
        )
        own = slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
        self.number = number
        self.router = nn.Parameter(router)
        self.up, self.down = nn.Parameter(up[own].clone()), nn.Parameter(down[own].clone())

    def forward(self, run: Run, x_TH: Tensor, bias_E: Tensor, step: Step) -> Tensor:
        masters = [self.up, self.down]
        replicas = WithReplicas(masters) if run.slots else None
        logits = x_TH @ self.router.T + bias_E
        ids = logits.detach().topk(K).indices
        weights = logits.gather(1, ids).softmax(1)
        ids = ids.clone()
        ids[::5, 1] = NO_ROUTE
        routing = Routing(expert_ids=ids, weights=weights, num_experts=E)
        groups = [tuple(masters)]
        if replicas is not None:
            made = run.plan(ids)
            replicas.sync(made, run.lane)
            routing = reroute(routing, made, run.rank)
            note(step, made, run.rank)
        ticket = run.dispatcher.dispatch_preprocess(x_TH, routing, layer=self.number, micro_batch=0)
        run.dispatcher.dispatch(ticket)
        if replicas is not None:
            groups = list(replicas.take())
        y = experts(run.dispatcher.dispatch_postprocess(ticket), groups)
        if replicas is not None and run.mutant == "not brought again":
            replicas.flight.leave()
        elif replicas is not None:
            y = replicas.again(y)
        run.dispatcher.combine_preprocess(ticket, y)
        run.dispatcher.combine(ticket)
        return x_TH + run.dispatcher.combine_postprocess(ticket)


def experts(inp: ExpertInput, groups: list[tuple[Tensor, ...]]) -> Tensor:
    """Rows through the experts of the groups (up, down), one expert after the other."""
    rows, ends = inp.rows(), inp.offsets.tolist()
    weights = [(up[n], down[n]) for up, down in groups for n in range(len(up))]
    parts = [
        torch.tanh(rows[begin:end] @ up.T) @ down.T * inp.row_weights[begin:end, None]
        for (begin, end), (up, down) in zip(itertools.pairwise(ends), weights, strict=True)
    ]
    return torch.cat(parts)


def note(step: Step, made: Plan, rank: int) -> None:
    mine = [copy for copy in copies(made) if copy.rank == rank]
    step.replicas.append(int(made.num_replicas()))
    step.rows.append(sum(int(made.quota[c.home * made.num_local + c.local, c.rank]) for c in mine))
    step.before.append(float(imbalance(rank_load(made.load.long().sum(0), made.num_ranks))))
    step.after.append(float(imbalance(made.rank_load())))


class Run:
    """Training on one rank, with S slots or with none.

    Args:
        group: expert parallel. dp: mesh of the ranks that hold the same experts, where there are several.
        sharded: parameters are FSDP2's over `dp`, and given up after forward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        slots: int,
        mutant: str = "",
        dp: Any = None,
        sharded: bool = False,
        device: str = "cpu",
    ) -> None:
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.slots, self.mutant, self.dp, self.device = slots, mutant, dp, device
        transports = {"not reduced": NotReduced, "reduced twice": TwiceReduced}
        self.transport = transports.get(mutant, GroupTransport)(group)
        physical = E + self.num_ranks * slots
        config = DispatchConfig(name=name, num_experts=physical, top_k=K, hidden_size=H, max_tokens=T)
        self.dispatcher: Dispatcher = build_dispatcher(config, group)
        self.layers = [Layer(number, self.rank, self.num_ranks).to(device) for number in range(LAYERS)]
        buffers = SlotBuffers(slots, [self.layers[0].up, self.layers[0].down])
        self.lane = SlotLane(self.transport, buffers)
        for layer in self.layers if sharded else []:
            fully_shard(layer, mesh=dp, reshard_after_forward=True)
            assert isinstance(layer, FSDPModule)
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_gradient_divide_factor(1.0)

    def plan(self, ids: Tensor) -> Plan:
        loads = [torch.empty(E, dtype=torch.int64, device=self.device) for _ in range(self.num_ranks)]
        dist.all_gather(loads, expert_load(ids, E), group=self.group)
        made = plan(torch.stack(loads), self.slots)
        self.transport.agree(made)
        return made

    def step(self, number: int) -> Step:
        """One SGD step. Rank 1 has no tokens in every third one."""
        place = 0 if self.dp is None else self.dp.get_local_rank()
        generator = torch.Generator().manual_seed(1000 + number * 10 + place * self.num_ranks + self.rank)
        tokens = 0 if self.rank == 1 and number % 3 == 1 else T
        x_TH, target_TH = (torch.randn(T, H, generator=generator)[:tokens].to(self.device) for _ in range(2))
        bias_E = torch.zeros(E).index_fill_(0, torch.tensor([number % E, (number % E) ^ 1]), 2.0).to(self.device)
        step, h = Step(), x_TH
        for layer in self.layers:
            h = layer(self, h, bias_E, step)
        loss = (h - target_TH).square().sum() / (T * self.num_ranks)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        step.loss = float(total)
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                self._update(step, name, parameter)
        return step

    @torch.no_grad()
    def _update(self, step: Step, name: str, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        here = grad.to_local() if isinstance(grad, DTensor) else grad
        if name == "router":
            dist.all_reduce(here, group=self.group)
        if self.dp is not None and not isinstance(grad, DTensor):
            dist.all_reduce(here, group=self.dp.get_group())
        step.grads.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu().clone())
        parameter -= RATE * grad
        parameter.grad = None
        if self.dp is not None and not isinstance(parameter, DTensor):
            everybody = [torch.empty_like(parameter) for _ in range(self.dp.size())]
            dist.all_gather(everybody, parameter.detach(), group=self.dp.get_group())
            step.copies_equal &= all(torch.equal(everybody[0], other) for other in everybody)


def train(
    group: dist.ProcessGroup, rank: int, name: str, slots: int, steps: int, mutant: str = "", device: str = "cpu"
) -> list[Step]:
    run = Run(group, name, slots, mutant, device=device)
    return [run.step(number) for number in range(steps)]


def largest_difference(ours: list[list[Step]], theirs: list[list[Step]]) -> float:
    """Of losses and gradients, relative to the largest entry of each gradient."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            worst = max(worst, abs(a.loss - b.loss) / abs(b.loss))
            for grad, reference in zip(a.grads, b.grads, strict=True):
                worst = max(worst, float((grad - reference).abs().max() / reference.abs().max().clamp_min(1e-3)))
    return worst


def messages(group: dist.ProcessGroup, rank: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Weights bit for bit, gradients in their order, whatever a rank has to send."""
    end, num_ranks = GroupTransport(group), group.size()
    load = torch.ones(num_ranks, 2 * num_ranks, dtype=torch.int32)
    load[:, 0] = 60
    made = plan(load, 2)
    assert (int(made.num_replicas()) > 0) == (num_ranks > 1)

    def values(of_rank: int, rows: int, kind: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(of_rank)
        return [torch.randn((rows, *s), generator=generator).to(device, kind) for s in ((3, 5), (4,))]

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
