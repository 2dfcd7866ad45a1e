"""A small stack that trains with a dispatcher, for the tests that compare dispatchers by their loss curves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ep import DominoLayer, DominoStack, MoEConfig, MoELayer
from moe_ep.dispatch import close_dispatchers

H, I, E, K = 256, 128, 8, 4  # noqa: E741
RATE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training run.

    Attributes:
        dispatcher, options: what moves the rows.
        steps: of Adam.
        tokens: of each rank's micro-batch.
        micro_batches: interleaved ones of a step.
        shuffle: seed of the order of tokens inside a micro-batch, which changes nothing but the order of sums.
        cut_weights: cut the gradient of the routing weights off.
        dtype, device: of rows and parameters; the routers stay float32.
    """

    dispatcher: str
    options: tuple[tuple[str, object], ...] = ()
    steps: int = 200
    tokens: int = 256
    micro_batches: int = 2
    shuffle: int = 0
    cut_weights: bool = False
    dtype: str = "bfloat16"
    device: str = "cuda"


def make_config(setup: Setup) -> MoEConfig:
    """The layers' configuration."""
    return MoEConfig(
        hidden_size=H, expert_intermediate_size=I, num_experts=E, top_k=K, dtype=setup.dtype,
        max_tokens=setup.tokens, dispatcher=setup.dispatcher, options=setup.options, init_std=0.06,
    )  # fmt: skip


class Block(DominoLayer):
    """A normalised matrix in the place of attention, then the experts."""

    def __init__(self, setup: Setup, group: dist.ProcessGroup, index: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(H), nn.Linear(H, H, bias=False)
        generator = torch.Generator().manual_seed(index)
        self.mix.weight.data = torch.randn(H, H, generator=generator) / H**0.5
        self.moe = MoELayer(make_config(setup), group, layer_index=index)
        self.moe.reset_parameters(7)
        if setup.cut_weights:
            self.moe.router.register_forward_hook(_cut_weights)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See DominoLayer."""
        h = x + self.mix(self.norm(x))
        return h, self.norm(h)


def _cut_weights(router: nn.Module, args: Any, out: Any) -> Any:
    routing, aux = out
    return replace(routing, weights=routing.weights.detach()), aux


def make_stack(setup: Setup, group: dist.ProcessGroup, layers: int = 4) -> DominoStack:
    """The layers on the setup's device, in its dtype."""
    stack = DominoStack(Block(setup, group, i) for i in range(layers))
    for block in stack.modules():
        if isinstance(block, nn.RMSNorm | nn.Linear):
            block.to(getattr(torch, setup.dtype))
    return stack.to(where(setup))


def where(setup: Setup) -> torch.device:
    """The rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if setup.device == "cuda" else torch.device("cpu")


def batch(setup: Setup, rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """x and its target, a fixed function of x, in the setup's order of tokens."""
    generator = torch.Generator().manual_seed((step * 8 + micro_batch) * 64 + rank)
    teacher = torch.randn(H, H, generator=torch.Generator().manual_seed(1)) / H**0.5
    x = torch.randn(setup.tokens, H, generator=generator)
    target = (x @ teacher).tanh()
    if setup.shuffle:
        order = torch.randperm(setup.tokens, generator=torch.Generator().manual_seed(setup.shuffle))
        x, target = x[order], target[order]
    dtype = getattr(torch, setup.dtype)
    return x.to(where(setup), dtype), target.to(where(setup), dtype)


def train(group: dist.ProcessGroup, rank: int, setup: Setup) -> list[float]:
    """The loss of every step, the mean over all tokens of all ranks."""
    stack = make_stack(setup, group)
    masters = Masters(stack, group)
    losses = []
    for step in range(setup.steps):
        pairs = [batch(setup, rank, step, i) for i in range(setup.micro_batches)]
        ys, _ = stack([x for x, _ in pairs])
        terms = [(y.float() - t.float()).square().sum() for y, (_, t) in zip(ys, pairs, strict=True)]
        count = setup.tokens * setup.micro_batches * group.size() * H
        loss = torch.stack(terms).sum() / count
        loss.backward()
        masters.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(total)
    close_dispatchers(group)
    return torch.stack(losses).tolist()


class Masters:
    """Adam on float32 copies of the parameters. What every rank holds gets the sum of its gradients."""

    def __init__(self, stack: DominoStack, group: dist.ProcessGroup) -> None:
        experts = {id(p) for m in stack.modules() if isinstance(m, MoELayer) for p in m.experts.parameters()}
        self.group, self.parameters = group, [p for p in stack.parameters() if p.requires_grad]
        self.shared = [id(p) not in experts for p in self.parameters]
        self.copies = [p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.copies, lr=RATE)

    def step(self) -> None:
        """One step, then the parameters are the rounded copies."""
        for parameter, copy, shared in zip(self.parameters, self.copies, self.shared, strict=True):
            copy.grad = torch.zeros_like(copy) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
            if shared:
                dist.all_reduce(copy.grad, group=self.group)
        self.optimizer.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.data.copy_(copy)


def interleaved_equals_serial(group: dist.ProcessGroup, rank: int, setup: Setup) -> list[str]:
    """Domino with the setup's micro-batches against one after the other: what differs in a single bit."""
    stack, problems = make_stack(setup, group, layers=3), []
    xs = [batch(setup, rank, 0, i)[0] for i in range(setup.micro_batches)]
    weight = torch.arange(1.0, H + 1, device=xs[0].device)

    def loss_of(y: Tensor) -> Tensor:
        return (y.float().square() * weight).sum() / H

    alone = []
    for x in xs:
        leaf = x.clone().requires_grad_()
        (y,), _ = stack([leaf])
        alone.append((y.detach(), *torch.autograd.grad(loss_of(y), leaf)))
    leaves = [x.clone().requires_grad_() for x in xs]
    ys, _ = stack(leaves)
    gradients = torch.autograd.grad(torch.stack([loss_of(y) for y in ys]).sum(), leaves)
    for i, (y, gradient) in enumerate(zip(ys, gradients, strict=True)):
        problems += [f"y of micro-batch {i}"] if not torch.equal(y.detach(), alone[i][0]) else []
        problems += [f"gradient of micro-batch {i}"] if not torch.equal(gradient, alone[i][1]) else []
    close_dispatchers(group)
    return problems


def distance(curve: list[float], first: list[float]) -> float:
    """Root mean square over the steps of the relative difference of two curves."""
    return (sum((a / b - 1) ** 2 for a, b in zip(curve, first, strict=True)) / len(first)) ** 0.5


def excess(curve: list[float], runs: list[list[float]], factor: float = 2.0) -> float:
    """How far a curve leaves the noise of runs that differ in the order of sums only: 1 is the edge.

    The noise is the largest distance of any run from the first one, and a curve may be `factor` times as far away:
    distances of independent runs of one kind differ by less than that, while a lost gradient shows from step to step.
    """
    return distance(curve, runs[0]) / (factor * max(distance(run, runs[0]) for run in runs[1:]))
