"""What the kernels' benchmark runs: each op on the sizes of one rank of two, with the bytes and operations it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from moe_ep.kernels.routes import count_message, count_message_reference
from moe_ep.kernels.split import split_bfloat16, split_bfloat16_reference
from torch import Tensor

from moe_ep.activation import activate, activate_backward, scale_, zero_tail_
from moe_ep.expert_input import ExpertInput
from moe_ep.grouped_mlp import grouped_swiglu
from moe_ep.load import expert_load
from moe_ep.losses import balance_loss
from moe_ep.permute import gather_rows, sum_rows
from moe_ep.recompute import choose_experts
from moe_ep.router_product import masked_logits
from moe_ep.scoring import mask_logits, weigh_routes
from moe_ep.sorted_routes import SortedRoutes, regroup, sort_routes

from .shapes import Shape, balanced_ids

DENSE_TFLOPS = 771.0  # of a large bfloat16 product on an H200
Run = Callable[[bool], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One op on one shape.

    Attributes:
        name: of the op and its place, such as "gather_rows: expand".
        run: does it, with the kernels or in plain torch.
        num_bytes: that must move, each input read once and each output written once.
        flops: of its matrix products.
        same_bits: whether both give the same bits; where not, they agree up to the rounding of the dtype.
        exact: what float64 says of the last output, None where nothing is rounded.
    """

    name: str
    run: Run
    num_bytes: int = 0
    flops: float = 0.0
    same_bits: bool = True
    exact: Callable[[], Tensor] | None = None
    wrong: list[str] = field(default_factory=list)

    def floor_us(self, hbm_tbs: float) -> float:
        """The larger of both times, in microseconds."""
        return max(self.num_bytes / (hbm_tbs * 1e6), self.flops / (DENSE_TFLOPS * 1e6))

    def check(self) -> float:
        """Relative error of the last output, against float64 or plain torch; notes what is wrong."""
        ours, torchs = self.run(True), self.run(False)
        for number, (one, other) in enumerate(zip(ours, torchs, strict=True)):
            if one.shape != other.shape or one.dtype != other.dtype:
                self.wrong.append(f"output {number} of {self.name} has another shape or dtype than plain torch's")
            elif self.same_bits and not torch.equal(one, other):
                self.wrong.append(f"output {number} of {self.name} differs from plain torch")
            elif not self.same_bits and not _error(one, other) < 4 * torch.finfo(torch.bfloat16).eps:
                self.wrong.append(f"output {number} of {self.name} is {_error(one, other):.1e} from plain torch")
        if self.exact is None and self.same_bits:
            return 0.0
        return _error(ours[-1], torchs[-1] if self.exact is None else self.exact())


def _error(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


class Place(NamedTuple):
    """Where and in what the ops run."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def randn(self, *size: int) -> Tensor:
        """The same numbers for the same size."""
        generator = torch.Generator(self.device).manual_seed(sum(size))
        return torch.randn(*size, device=self.device, generator=generator, dtype=self.dtype)

    def weights(self) -> Tensor:
        """float32 [N], away from 0."""
        generator = torch.Generator(self.device).manual_seed(1)
        return 0.1 + torch.rand(self.shape.T * self.shape.K, device=self.device, generator=generator)

    def ids(self) -> Tensor:
        """Balanced ids, int64 [T, K]."""
        return balanced_ids(self.shape, 2, 0, torch.Generator().manual_seed(self.shape.T)).to(self.device)


def works(place: Place) -> list[Work]:
    """The ops of a dispatch, a combine, the experts and their backward, on random rows."""
    ids, num_experts = place.ids(), place.shape.E
    routes = sort_routes(ids, num_experts)
    counts_RL = routes.counts.view(2, -1)
    return [
        *_routers(place),
        *_integers(ids, counts_RL, num_experts),
        *_movements(place, routes, counts_RL),
        *_activations(place),
        _experts(place, counts_RL),
    ]


def _routers(place: Place) -> list[Work]:
    T, _, _, E, K = place.shape
    generator = torch.Generator(place.device).manual_seed(E)
    logits = torch.randn(T, E, device=place.device, generator=generator)
    scores, d_weights = logits.softmax(-1), torch.randn(T, K, device=place.device, generator=generator)
    alive = torch.ones(T, dtype=torch.bool, device=place.device)
    ids = choose_experts(scores, alive, K, 1)
    load = expert_load(ids, E)

    def weigh(kernels: bool, leaf: Tensor = scores) -> tuple[Tensor, Tensor]:
        return weigh_routes(leaf, ids, normalize=True, scale=1.0, kernels=kernels)

    def back(kernels: bool) -> Sequence[Tensor]:
        leaf = scores.detach().requires_grad_()
        return [*torch.autograd.grad(weigh(kernels, leaf)[0], leaf, d_weights)]

    def balance(kernels: bool, leaf: Tensor = scores) -> Tensor:
        return balance_loss(leaf, ids, alive, load_E=load, kernels=kernels)

    def balance_back(kernels: bool) -> Sequence[Tensor]:
        leaf = scores.detach().requires_grad_()
        return [*torch.autograd.grad(balance(kernels, leaf), leaf)]

    return [
        Work(
            name="mask_logits",
            run=lambda kernels: mask_logits(logits, None, kernels=kernels),
            num_bytes=T * (8 * E + 1),
        ),
        Work(
            name="top_experts",
            run=lambda kernels: [choose_experts(scores, alive, K, 1, kernels=kernels)],
            num_bytes=T * (4 * E + 8 * K),
        ),
        Work(name="weigh_routes", run=lambda kernels: weigh(kernels)[::-1], num_bytes=T * K * 16, same_bits=False),
        Work(name="weigh_routes: fwd+bwd", run=back, num_bytes=T * (4 * E + 36 * K), same_bits=False),
        Work(name="balance_loss", run=lambda kernels: [balance(kernels)], num_bytes=T * (4 * E + 1), same_bits=False),
        Work(name="balance_loss: fwd+bwd", run=balance_back, num_bytes=T * (8 * E + 2), same_bits=False),
        *_logits(place),
    ]


def _logits(place: Place) -> list[Work]:
    """The product of rows and a router's float32 weights, and the parts that it is made of."""
    T, H, _, E, _ = place.shape
    x, d_logits = place.randn(T, H), torch.randn(T, E, device=place.device)
    weight = torch.randn(E, H, device=place.device)

    def forward(kernels: bool) -> Sequence[Tensor]:
        return masked_logits(x, weight, None, kernels=kernels)[:1]

    def both(kernels: bool) -> Sequence[Tensor]:
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(masked_logits(*leaves, None, kernels=kernels)[0], leaves, d_logits)

    def split(kernels: bool) -> Sequence[Tensor]:
        of = split_bfloat16 if kernels else split_bfloat16_reference
        return [of(weight, (0, 1, 2), False)]

    size = x.element_size()
    return [
        Work(name="split_bfloat16", run=split, num_bytes=E * H * 10),
        Work(
            name="logits",
            run=forward,
            num_bytes=T * (size * H + 4 * E) + 4 * E * H,
            same_bits=False,
            exact=lambda: x.double() @ weight.double().t(),
        ),
        Work(
            name="logits: fwd+bwd",
            run=both,
            num_bytes=T * (3 * size * H + 12 * E) + 12 * E * H,
            same_bits=False,
            exact=lambda: d_logits.double().t() @ x.double(),
        ),
    ]


def _integers(ids: Tensor, counts_RL: Tensor, num_experts: int) -> list[Work]:
    num_rows = ids.numel()

    def sort(kernels: bool) -> Sequence[Tensor]:
        found = sort_routes(ids, num_experts, kernels=kernels)
        return found.row_token, found.row_slot, found.positions, found.counts, found.offsets

    def group(kernels: bool) -> Sequence[Tensor]:
        return [tensor for tensor in regroup(counts_RL, num_rows, kernels=kernels) if tensor is not None]

    num_ranks, num_local = counts_RL.shape
    counts_E, faults = counts_RL.reshape(-1).contiguous(), [counts_RL.new_zeros(()), counts_RL.new_zeros(())]

    def tell(kernels: bool) -> Sequence[Tensor]:
        message = count_message if kernels else count_message_reference
        return [message(counts_E, faults, [4, 6], 0, 1, num_ranks)[0]]

    return [
        Work(name="sort_routes", run=sort, num_bytes=num_rows * (8 + 3 * 4)),
        Work(name="regroup_rows", run=group, num_bytes=num_rows * 2 * 4),
        Work(name="count_message", run=tell, num_bytes=num_ranks * (2 * num_local + 3) * 8 + 2 * 8),
    ]


def _movements(place: Place, routes: SortedRoutes, counts_RL: Tensor) -> list[Work]:
    T, H, _, _, K = place.shape
    N, row = T * K, H * place.dtype.itemsize
    x, rows, weights = place.randn(T, H), place.randn(N, H), place.weights()
    moved, slots = (routes.row_token, routes.positions), (routes.row_slot, routes.positions.view(-1, 1))
    order, places, _, _ = regroup(counts_RL, N)

    def gather(source: Tensor, to: tuple[Tensor, Tensor]) -> Run:
        return lambda kernels: [gather_rows(source, *to, kernels=kernels)]

    def add(to: tuple[Tensor, Tensor]) -> Run:
        return lambda kernels: [sum_rows(rows, *to, kernels=kernels)]

    found = [
        Work(name="gather_rows: expand", run=gather(x, moved), num_bytes=(T + N) * row),
        Work(
            name="sum_rows: reduce",
            run=add(moved),
            num_bytes=(T + N) * row,
            exact=lambda: sum_rows(rows.double(), *moved),
        ),
        Work(name="gather_rows: weights", run=gather(weights, slots), num_bytes=N * (4 + 4 + 4)),
    ]
    if order is not None and places is not None:
        there = (order, places.view(-1, 1))
        found += [
            Work(name="gather_rows: regroup", run=gather(rows, there), num_bytes=2 * N * row),
            Work(name="sum_rows: regroup", run=add(there), num_bytes=2 * N * row),
        ]
    return found


def _activations(place: Place) -> list[Work]:
    T, H, I, _, K = place.shape  # noqa: E741
    N, e = T * K, place.dtype.itemsize
    h, q, y, weights = place.randn(N, 2 * I), place.randn(N, I), place.randn(N, H), place.weights()
    ends = torch.tensor([N], dtype=torch.int32, device=place.device)

    def backward(kernels: bool) -> Sequence[Tensor]:
        taken = q if kernels else q.clone()  # torch overwrites it
        found = activate_backward(taken, h, weights, ends, (True, True, True), kernels=kernels)
        return [tensor for tensor in found if tensor is not None]

    three_quarters, tail = ends * 3 // 4, N - N * 3 // 4

    def clear(kernels: bool) -> Sequence[Tensor]:
        return [zero_tail_(y.clone(), three_quarters, None, kernels=kernels)]

    return [
        Work(
            name="swiglu: forward",
            run=lambda kernels: [activate(h, None, ends, kernels=kernels)],
            num_bytes=3 * N * I * e,
            same_bits=False,
        ),
        Work(name="swiglu: backward", run=backward, num_bytes=6 * N * I * e, same_bits=False),
        Work(
            name="clone, scale_rows",
            run=lambda kernels: [scale_(y.clone(), weights, ends, kernels=kernels)],
            num_bytes=4 * N * H * e,
        ),
        Work(name="clone, zero_tail", run=clear, num_bytes=(2 * N + tail) * H * e),
    ]


def _experts(place: Place, counts_RL: Tensor) -> Work:
    T, H, I, _, K = place.shape  # noqa: E741
    N, counts = T * K, counts_RL.sum(0)
    order, places, offsets, tokens = regroup(counts_RL, N)
    source, dy = place.randn(N, H).requires_grad_(), place.randn(N, H)
    weights = place.weights().requires_grad_()
    w_gate_up = (0.02 * place.randn(counts.numel(), 2 * I, H)).requires_grad_()
    w_down = (0.02 * place.randn(counts.numel(), H, I)).requires_grad_()
    leaves = (source, weights, w_gate_up, w_down)
    host_counts = tuple(counts.tolist())

    def run(kernels: bool) -> Sequence[Tensor]:
        inp = ExpertInput(
            source=source, row_weights=weights, offsets=offsets, tokens_per_expert=tokens, capacity=N,
            row_index=order, positions=None if places is None else places.view(-1, 1), host_counts=host_counts,
            kernels=kernels,
        )  # fmt: skip
        y = grouped_swiglu(inp, w_gate_up, w_down, weight_activation=False)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return Work(name="experts: fwd+bwd", run=run, flops=18.0 * N * H * I, same_bits=False)
