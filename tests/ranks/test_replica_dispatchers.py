"""Copies of hot experts behind every back end that runs on CPU ranks: libraries over their doubles, others' packages.

Whole layers, forward and backward, with slots and without: the same numbers, and fuller ranks are relieved.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import MoEConfig, MoELayer, close_dispatchers
from moe_ep.dispatch import Dispatcher, find_dispatcher, known_dispatchers
from moe_ep.load import imbalance, rank_load
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import FORMS
from tests.ranks import nccl_ep_variants, small_deepep

assert nccl_ep_variants  # imported for its names of the double

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example_dispatcher"
SIZES: dict[str, Any] = dict(num_experts=8, top_k=2, hidden_size=256, expert_intermediate_size=16, max_tokens=24)
FLOAT32 = ("all2all", "agrs", "equal_blocks", "double", "double-flat")
CASES: dict[str, dict[str, Any]] = {
    **{name: dict(dispatcher=name) for name in FLOAT32},
    "double-budget": dict(dispatcher="double-budget", experts="loop"),  # torch's experts want counts on the host
    **{
        f"deepep {form}": dict(dispatcher=small_deepep.DoubledDeepEP.name, dtype="bfloat16", options=options)
        for form, options in FORMS.items()
    },
}
# a gradient is rounded to bfloat16 where it is made, and its sum with a copy's once more: 2^-8 of its largest entry
BOUNDS = {"float32": 1e-5, "bfloat16": 2**-7}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=90) as ranks:
        yield ranks


@dataclass
class Done:
    """Of two steps: outputs and gradients, copies on all ranks, imbalance of ranks at home and as it was."""

    numbers: list[Tensor]
    copies: list[int]
    before: list[float]
    after: list[float]


def known(name: str) -> None:
    """Makes a back end known that no installed package names here."""
    if name == "equal_blocks" and name not in known_dispatchers():
        sys.path.append(str(EXAMPLE))
        importlib.import_module(name)
    assert issubclass(find_dispatcher(name), Dispatcher)


def train(group: dist.ProcessGroup, rank: int, changes: dict[str, Any], slots: int) -> Done:
    """Two steps of one layer; experts 1 and 2 are popular, and rank 1 has no tokens in the second step."""
    known(changes["dispatcher"])
    layer = MoELayer(MoEConfig(**(SIZES | dict(replica=dict(slots=slots)) | changes)), group)
    layer.reset_parameters(3)
    done = Done([], [], [], [])
    popular = layer.router.weight.detach()[1:3].sum(0) * 30
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(0 if step == 1 and rank == 1 else 20, 256, generator=generator) + popular
        x = x.to(getattr(torch, layer.config.dtype)).requires_grad_()
        y, aux = layer(x)
        (y.float().square().sum() + aux.loss).backward()
        rows_R, load_E, copies = aux.rank_load.clone(), aux.load.clone(), torch.as_tensor(aux.replicas).clone()
        for value in (rows_R, load_E, copies):
            dist.all_reduce(value, group=group)
        done.copies.append(int(copies))
        done.before.append(float(imbalance(rank_load(load_E, group.size()))))
        done.after.append(float(imbalance(rows_R)))
        assert x.grad is not None
        done.numbers += [y.detach().float(), x.grad.float()]
        for parameter in layer.parameters():
            assert parameter.grad is not None
            done.numbers.append(parameter.grad.float())
            parameter.grad = None
    layer.dispatcher.raise_if_faulted()
    if layer.replicas is not None:
        layer.replicas.check_returned()
    close_dispatchers(group)
    return done


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_itself_without_copies(pool: RankPool, name: str, num_ranks: int) -> None:
    ours, theirs = (pool.run(train, CASES[name], slots, num_ranks=num_ranks) for slots in (2, 0))
    bound = BOUNDS[CASES[name].get("dtype", "float32")]
    for mine, other in zip(ours, theirs, strict=True):
        assert all(count > 0 for count in mine.copies) and not any(other.copies)
        assert all(a < 1.1 < 1.3 < b for a, b in zip(mine.after, mine.before, strict=True))
        assert other.after == other.before == mine.before
        for got, want in zip(mine.numbers, other.numbers, strict=True):
            assert want.numel() == 0 or float((got - want).abs().max()) <= bound * float(want.abs().max())
