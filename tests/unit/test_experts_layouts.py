"""Rows, gradients and parameters of experts in any memory layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from moe_ep.grouped_mlp import pad_inputs

from .small_experts import (
    NAMES,
    assert_close,
    expected,
    experts_for,
    forward_backward,
    make_dy,
    make_input,
)


def test_aligned_sizes_are_not_copied() -> None:
    experts = experts_for("torch", 2, 16, 8, dtype="bfloat16")
    inp = make_input((2, 3), 16, torch.bfloat16)
    same = pad_inputs(inp, experts.w_gate_up, experts.w_down)
    assert same[0] is inp and same[1] is experts.w_gate_up and same[2] is experts.w_down
    odd = experts_for("torch", 2, 15, 9, dtype="bfloat16")
    wide = pad_inputs(make_input((2, 3), 15, torch.bfloat16), odd.w_gate_up, odd.w_down)
    assert [tuple(t.shape) for t in (wide[0].source, *wide[1:])] == [(5, 16), (2, 32, 16), (2, 16, 16)]


@pytest.mark.parametrize("hidden", (16, 5))
@pytest.mark.parametrize("counts", ((4, 0, 3), (1,)), ids=("eight_rows", "one_row"))
@pytest.mark.parametrize("name", NAMES)
def test_expanded_and_transposed_gradients(name: str, counts: tuple[int, ...], hidden: int) -> None:
    """Gradients with stride 0 or a transposed layout (pytorch/pytorch#120582, pytorch/pytorch#144060)."""
    for make in ("sum", "transposed", "strided"):
        experts = experts_for(name, len(counts), hidden)
        inp = make_input(counts, hidden, torch.float32)
        y = experts(inp)
        dy = torch.ones_like(y) if make == "sum" else make_dy(inp)
        if make == "sum":
            y.sum().backward()
        elif make == "transposed":
            y.t().backward(dy.t().contiguous())
        else:
            y.backward(torch.stack([dy, dy], dim=-1)[..., 1])
        got = {"w_gate_up": experts.w_gate_up.grad, "w_down": experts.w_down.grad, "dx": inp.source.grad}
        want = expected(experts, inp, dy)
        assert_close(got, {key: want[key] for key in got}, torch.float32)


@pytest.mark.parametrize("layout", ("transposed", "misaligned", "column_slice", "one_strided_row", "expanded"))
def test_rows_of_any_memory_layout(layout: str) -> None:
    """A transposed view, slices that start between 16-byte units, an expanded row (pytorch/torchtitan#2242)."""
    counts = (1,) if layout == "one_strided_row" else (3, 0, 4)
    base = make_input(counts, 16, torch.float32)
    x = base.source.detach()
    num_rows = x.shape[0]
    views = {
        "transposed": lambda: x.t().contiguous().t(),
        "misaligned": lambda: torch.cat([torch.zeros(1), x.flatten()])[1:].view(num_rows, 16),
        "column_slice": lambda: F.pad(x, (3, 2))[:, 3:19],
        "one_strided_row": lambda: F.pad(x, (0, 1))[:, :16],
        "expanded": lambda: x[:1].expand(num_rows, 16),
    }
    view = views[layout]().requires_grad_()
    inp = dataclasses.replace(base, source=view)
    experts = experts_for("torch", len(counts))
    dy = make_dy(inp)
    assert_close(forward_backward(experts, inp, dy), expected(experts, inp, dy), torch.float32)


def test_misaligned_parameters() -> None:
    """Frameworks hand out parameters as views into one flat buffer."""
    experts = experts_for("torch", 2)
    for name, parameter in list(experts.named_parameters()):
        flat = torch.cat([torch.zeros(1), parameter.detach().flatten()])
        setattr(experts, name, torch.nn.Parameter(flat[1:].view(parameter.shape)))
    assert experts.w_down.data_ptr() % 16 != 0
    inp = make_input((3, 2), 16, torch.float32)
    dy = make_dy(inp)
    assert_close(forward_backward(experts, inp, dy), expected(experts, inp, dy), torch.float32)
