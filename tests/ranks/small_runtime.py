"""Training of a small stack whose popular experts move, with replicas or without: losses, gradients, loads.

Routers pull towards the expert that the step makes popular, because every token gets a part of that expert's first
router weights. Two layers share slots; one rank has no tokens now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import DominoStack, MoEAux, moe_layers
from moe_ep.load import imbalance, rank_load
from moe_ep.replica.runtime import ReplicaRuntime
from tests.ranks.small_stack import H, loss_of, small_stack

E, T, RATE = 8, 24, 0.02
SIZES: dict[str, Any] = dict(num_experts=E, max_tokens=T, expert_intermediate_size=24)


@dataclass
class Step:
    """What one step came to: per layer copies on all ranks, rows that they computed, rank imbalance before, after."""

    loss: float = 0.0
    grads: list[Tensor] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


class Training:
    """One rank of it.

    Args:
        group: expert parallel.
        changes: to the layers' configuration, `replica` among them.
        num: M micro-batches that interleave.
        accumulated: groups of them in a step.
        device: of everything; the dtype is `changes`'.
        layers: how many.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        changes: dict[str, Any],
        num: int = 1,
        accumulated: int = 1,
        device: str = "cpu",
        layers: int = 2,
    ) -> None:
        self.group, self.rank, self.num, self.accumulated, self.device = group, group.rank(), num, accumulated, device
        self.dtype: torch.dtype = getattr(torch, changes.get("dtype", "float32"))
        self.stack: DominoStack = small_stack(group, SIZES | dict(num_micro_batches=num) | changes, (False,) * layers)
        self.stack.to(device, self.dtype)
        self.pull_EH = moe_layers(self.stack)[0].router.weight.detach().cpu() * 40
        own = {p for layer in moe_layers(self.stack) for p in layer.experts.parameters()}
        self.copies = [p for p in self.stack.parameters() if p not in own]

    @property
    def runtime(self) -> ReplicaRuntime:
        """Of both layers."""
        (found,) = {layer.replicas for layer in moe_layers(self.stack)}
        assert found is not None
        return found

    def inputs(self, number: int, place: int) -> list[Tensor]:
        """M micro-batches; popular are expert `number` and, less so, the one behind it."""
        xs = []
        for i in range(self.num):
            generator = torch.Generator().manual_seed(1000 * number + 100 * place + 10 * i + self.rank)
            tokens = 0 if self.rank == 1 and (number + i) % 3 == 1 else T - self.rank
            pull = self.pull_EH[number % E] + 0.7 * self.pull_EH[(number + 1) % E]
            xs.append((torch.randn(T, H, generator=generator)[:tokens] + pull).to(self.device, self.dtype))
        return xs

    def step(self, number: int) -> Step:
        """Forward and backward of all micro-batches, sums over ranks, one step of SGD."""
        step, total = Step(), torch.zeros((), device=self.device)
        loads: list[list[MoEAux]] = []
        for place in range(self.accumulated):
            ys, auxes = self.stack(self.inputs(number, place))
            losses = [loss_of(y, said) for y, said in zip(ys, auxes, strict=True)]
            loss = torch.stack(losses).sum() / (T * H * H * 8)
            loss.backward()
            total, loads = total + loss.detach(), loads + auxes
        dist.all_reduce(total, group=self.group)
        step.loss = float(total)
        self._note(step, loads)
        for p in self.copies:
            assert p.grad is not None
            dist.all_reduce(p.grad, group=self.group)
        for p in self.stack.parameters():
            assert p.grad is not None
            step.grads.append(p.grad.cpu().clone())
            p.data -= RATE * p.grad
            p.grad = None
        return step

    def _note(self, step: Step, loads: list[list[MoEAux]]) -> None:
        for auxes in zip(*loads, strict=True):
            load_E = sum(aux.load for aux in auxes).cpu()
            rows_R, copies = sum(aux.rank_load for aux in auxes).cpu(), sum(aux.replicas for aux in auxes).cpu()
            for value in (load_E, rows_R, copies):
                dist.all_reduce(value, group=self.group)
            home_R = rank_load(load_E, self.group.size())
            step.replicas.append(int(copies))
            step.moved.append(int((rows_R - home_R).clamp_min(0).sum()))
            step.before.append(float(imbalance(home_R)))
            step.after.append(float(imbalance(rows_R)))


def train(
    group: dist.ProcessGroup, rank: int, changes: dict[str, Any], steps: int, num: int = 1, accumulated: int = 1
) -> list[Step]:
    """That many steps."""
    training = Training(group, changes, num, accumulated)
    done = [training.step(number) for number in range(steps)]
    if training.stack.layers[0].moe.replicas is not None:  # type: ignore[union-attr]
        training.runtime.check_returned()
    return done


def largest_difference(ours: list[list[Step]], theirs: list[list[Step]]) -> float:
    """Of losses and gradients of all ranks and steps, relative to the largest entry of each gradient."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            worst = max(worst, abs(a.loss - b.loss) / abs(b.loss))
            for grad, reference in zip(a.grads, b.grads, strict=True):
                worst = max(worst, float((grad - reference).abs().max() / reference.abs().max().clamp_min(1e-6)))
    return worst
