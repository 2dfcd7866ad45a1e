"""Rows and experts for the tests of experts, and the float64 oracle's view of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts
from moe_ep.sorted_routes import make_offsets
from moe_ep.testing.oracle import RankInput, SwiGLUExperts, run_oracle

NAMES = ("torch", "loop")


COUNTS = {
    "one_expert": (5,),
    "uneven": (3, 0, 7),
    "empty_first_and_last": (0, 4, 1, 0),
    "all_rows_in_one": (0, 0, 11),
    "no_rows": (0, 0),
    "17_experts": tuple((3 * e) % 5 for e in range(17)),
    "64_experts": tuple((7 * e) % 4 for e in range(64)),
    "160_experts": tuple(e % 2 for e in range(160)),
}


def experts_for(name: str, num_local: int, hidden: int = 16, inner: int = 8, **keys: Any) -> GroupedExperts:
    keys = {"init_std": 0.4, **keys}
    config = MoEConfig(
        hidden_size=hidden, expert_intermediate_size=inner, num_experts=num_local, top_k=1, experts=name, **keys
    )
    return build_experts(config, num_local, 0, 0)


def make_input(
    counts: tuple[int, ...], hidden: int, dtype: torch.dtype, *, tail: int = 0, unique: bool = False, seed: int = 0
) -> ExpertInput:
    """Random rows, NaN in the tail. `unique`: every second expert row repeats its predecessor's source row."""
    gen = torch.Generator().manual_seed(seed)
    total, num_rows = sum(counts), sum(counts) + tail
    num_source = (total + 1) // 2 if unique else num_rows
    source = torch.randn(num_source, hidden, generator=gen).to(dtype)
    weights = torch.rand(num_rows, generator=gen) + 0.1
    weights[total:] = float("nan")
    row_index = positions = None
    if unique:
        row_index = torch.full((num_rows,), -1, dtype=torch.int32)
        row_index[:total] = torch.arange(total, dtype=torch.int32) // 2
        positions = torch.arange(2 * num_source, dtype=torch.int32).view(num_source, 2)
        positions = positions.masked_fill(positions >= total, -1)
    else:
        source[total:] = float("nan")
    counts_L = torch.tensor(counts, dtype=torch.int32)
    return ExpertInput(
        source=source.requires_grad_(),
        row_weights=weights.requires_grad_(),
        offsets=make_offsets(counts_L),
        tokens_per_expert=counts_L,
        capacity=num_rows,
        row_index=row_index,
        positions=positions,
    )


def make_dy(inp: ExpertInput, seed: int = 1) -> Tensor:
    dy = torch.randn(inp.capacity, inp.source.shape[1], generator=torch.Generator().manual_seed(seed))
    dy[int(inp.offsets[-1]) :] = float("nan")
    return dy.to(inp.source.dtype)


def forward_backward(experts: GroupedExperts, inp: ExpertInput, dy: Tensor) -> dict[str, Tensor]:
    y = experts(inp)
    y.backward(dy)
    grads = {"dx": inp.source.grad, "dweights": inp.row_weights.grad}
    grads |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach()[: int(inp.offsets[-1])], **{k: g for k, g in grads.items() if g is not None}}


Expected = dict[str, tuple[Tensor, float]]


def expected(experts: GroupedExperts, inp: ExpertInput, dy: Tensor) -> Expected:
    """The oracle's view of the valid rows, one "token" a row: each result with the norm that its error is held to.

    That is the result's own norm, but for the gradient of the row weights, <dy, f>, which may cancel: |dy| |f|.
    """
    total = int(inp.offsets[-1])
    index = torch.arange(inp.capacity) if inp.row_index is None else inp.row_index
    ids = torch.arange(inp.num_local_experts).repeat_interleave(inp.tokens_per_expert)
    rank = RankInput(
        x=inp.source.detach()[index[:total]],
        expert_ids=ids.view(-1, 1),
        weights=inp.row_weights.detach()[:total].view(-1, 1),
        dy=dy[:total],
    )
    result = run_oracle([rank], SwiGLUExperts(experts.w_gate_up.detach(), experts.w_down.detach()))
    dx = torch.zeros(inp.source.shape, dtype=torch.float64).index_add_(0, index[:total].long(), result.dx[0])
    dweights = torch.zeros(inp.capacity, dtype=torch.float64)
    dweights[:total] = result.dweights[0].view(-1)
    want = {"y": result.y[0], "dx": dx, "dweights": dweights}
    want |= {"w_gate_up": result.dparams[0], "w_down": result.dparams[1]}
    scales = {name: value.norm().item() for name, value in want.items()}
    f_norms = result.y[0].norm(dim=1) / rank.weights.double().view(-1)
    scales["dweights"] = (f_norms * rank.dy.double().norm(dim=1)).norm().item()
    return {name: (value, scales[name]) for name, value in want.items()}


def assert_close(got: dict[str, Tensor], want: Expected, dtype: torch.dtype) -> None:
    """The longest chain (h, silu, act, product, weight, dh, dx, sum) rounds eight times, each by at most eps / 2."""
    assert got.keys() == want.keys()
    for name, (value, scale) in want.items():
        error = (got[name].double() - value).norm().item()
        assert error <= 4 * torch.finfo(dtype).eps * scale, f"{name}: error {error} of {scale}"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every tensor that torch allocates without a value is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
