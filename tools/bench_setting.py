"""What all candidates of one comparison share: ranks, sizes, inputs, one routing for each iteration and its traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.config import Kernels
from moe_ep.load import expert_load, rank_load
from moe_ep.routing import Routing

from .floors import Traffic, count_destinations, count_traffic
from .shapes import Shape, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands."""

    device: torch.device
    group: dist.ProcessGroup | None
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One shape and skew on these ranks.

    Attributes:
        place: device and ranks.
        dtype: of rows and of the experts' weights.
        workload: where the routings come from.
        routings: this rank's, one per iteration (a stack of layers counts micro-batches), on the device.
        x, dy: [T, H], input and the gradient that arrives at the output.
        counts: int64 [iterations, L] on the CPU, rows that each expert of this rank must get.
        traffic: of each iteration, of each rank.
        skew_realised: max/mean over ranks, mean over the iterations.
        kernels: what moves rows on a GPU, as in a recipe.
    """

    place: Place
    dtype: torch.dtype
    workload: Workload
    routings: list[Routing]
    x: Tensor
    dy: Tensor
    counts: Tensor
    traffic: list[list[Traffic]]
    skew_realised: float
    kernels: Kernels = "auto"

    @property
    def shape(self) -> Shape:
        """T, H, I, E, K."""
        return self.workload.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of x."""
        return self.shape.H * self.dtype.itemsize

    @property
    def num_local(self) -> int:
        """L."""
        return self.shape.E // self.place.num_ranks


def make_setting(
    workload: Workload, place: Place, dtype: torch.dtype, iterations: int, kernels: Kernels = "auto"
) -> Setting:
    """Draw inputs and routings, and hold the loads of all of them against the target before anything is timed.

    Collective over the group.
    """
    shape, device = workload.shape, place.device
    drawn = [workload.routing(place.rank, i) for i in range(iterations)]
    own = [_summary(routing.expert_ids, shape.E, place.num_ranks) for routing in drawn]
    unique_RnR, load_RnE = gather(torch.stack(own), place).split([place.num_ranks, shape.E], dim=2)
    routes_RnR = rank_load(load_RnE, place.num_ranks)
    realised = [workload.check_load(load_R) for load_R in routes_RnR.sum(0)]
    tokens = [shape.T] * place.num_ranks
    generator = torch.Generator().manual_seed(workload.seed * 4096 + place.rank)
    x, dy = (torch.randn(shape.T, shape.H, generator=generator).to(device, dtype) for _ in range(2))
    return Setting(
        place=place,
        dtype=dtype,
        workload=workload,
        routings=[_move(routing, device) for routing in drawn],
        x=x,
        dy=dy,
        counts=load_RnE.sum(0).view(iterations, place.num_ranks, -1)[:, place.rank],
        traffic=[count_traffic(tokens, unique_RnR[:, i], routes_RnR[:, i]) for i in range(iterations)],
        skew_realised=sum(realised) / len(realised),
        kernels=kernels,
    )


def _summary(ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Unique rows to each rank, then routes to each expert: int64 [R + E]."""
    unique_R, _ = count_destinations(ids_TK, num_experts, num_ranks)
    return torch.cat([unique_R, expert_load(ids_TK, num_experts)])


def _move(routing: Routing, device: torch.device) -> Routing:
    ids, weights = routing.expert_ids.to(device), routing.weights.to(device)
    return Routing(expert_ids=ids, weights=weights, num_experts=routing.num_experts)


def gather(tensor: Tensor, place: Place) -> Tensor:
    """Every rank's equally shaped tensor, stacked by rank: [R, ...] on the tensor's device."""
    if place.group is None:
        return tensor.unsqueeze(0)
    moved = tensor.to(place.device).contiguous()
    parts = [torch.empty_like(moved) for _ in range(place.num_ranks)]
    dist.all_gather(parts, moved, group=place.group)
    return torch.stack(parts).to(tensor.device)


def sum_ranks(tensor: Tensor, place: Place) -> Tensor:
    """Sum over the ranks, in place."""
    if place.group is not None:
        dist.all_reduce(tensor, group=place.group)
    return tensor


Problem = tuple[str, str]


def agree(problem: Problem | None, place: Place) -> Problem | None:
    """The (status, reason) of the lowest rank that has one, the same on every rank; None where none has. Collective."""
    if place.group is None:
        return problem
    everybody: list[Problem | None] = [None] * place.num_ranks
    dist.all_gather_object(everybody, problem, group=place.group)
    found = [(rank, *pair) for rank, pair in enumerate(everybody) if pair is not None]
    if not found:
        return None
    rank, status, reason = found[0]
    return status, f"rank {rank}: {reason}"
