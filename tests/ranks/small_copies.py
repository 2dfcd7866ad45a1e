"""Two steps of a layer with copies of hot experts, for any back end and device, and what they are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import MoEConfig, MoELayer, close_dispatchers
from moe_ep.load import imbalance, rank_load

SIZES: dict[str, Any] = dict(num_experts=8, top_k=2, hidden_size=256, expert_intermediate_size=16, max_tokens=24)
# a gradient is rounded to bfloat16 where it is made, and its sum with a copy's once more: 2^-8 of its largest entry
BOUNDS = {"float32": 1e-5, "bfloat16": 2**-7}


@dataclass
class Done:
    """Of two steps: outputs and gradients, copies on all ranks, imbalance of ranks at home and as it was."""

    numbers: list[Tensor]
    copies: list[int]
    before: list[float]
    after: list[float]


def train(group: dist.ProcessGroup, rank: int, changes: dict[str, Any], slots: int, device: str = "cpu") -> Done:
    """Two steps of one layer; experts 1 and 2 are popular, and rank 1 has no tokens in the second step."""
    layer = MoELayer(MoEConfig(**(SIZES | dict(replica=dict(slots=slots)) | changes)), group).to(device)
    layer.reset_parameters(3)
    done = Done([], [], [], [])
    popular = layer.router.weight.detach().cpu()[1:3].sum(0) * 30
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(0 if step == 1 and rank == 1 else 20, 256, generator=generator) + popular
        x = x.to(device, getattr(torch, layer.config.dtype)).requires_grad_()
        y, aux = layer(x)
        (y.float().square().sum() + aux.loss).backward()
        rows_R, load_E, copies = (
            aux.rank_load.clone(),
            aux.load.clone(),
            torch.as_tensor(aux.replicas, device=device).clone(),
        )
        for value in (rows_R, load_E, copies):
            dist.all_reduce(value, group=group)
        done.copies.append(int(copies))
        done.before.append(float(imbalance(rank_load(load_E, group.size()))))
        done.after.append(float(imbalance(rows_R)))
        assert x.grad is not None
        done.numbers += [y.detach().float().cpu(), x.grad.float().cpu()]
        for parameter in layer.parameters():
            assert parameter.grad is not None
            done.numbers.append(parameter.grad.float().cpu())
            parameter.grad = None
    layer.dispatcher.raise_if_faulted()
    if layer.replicas is not None:
        layer.replicas.check_returned()
    close_dispatchers(group)
    return done


def check_equal(ours: list[Done], theirs: list[Done], dtype: str) -> None:
    """The same numbers on all ranks, with copies that even the ranks out and without any."""
    for mine, other in zip(ours, theirs, strict=True):
        assert all(count > 0 for count in mine.copies) and not any(other.copies)
        assert all(a < 1.1 < 1.3 < b for a, b in zip(mine.after, mine.before, strict=True))
        assert other.after == other.before == mine.before
        for got, want in zip(mine.numbers, other.numbers, strict=True):
            assert want.numel() == 0 or float((got - want).abs().max()) <= BOUNDS[dtype] * float(want.abs().max())
