"""Experts of one rank against the float64 oracle: values, every gradient, NaN in tails, odd sizes, frozen parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep.activation import row_dot
from moe_ep.errors import Unavailable

from .small_experts import (
    COUNTS,
    NAMES,
    assert_close,
    expected,
    experts_for,
    forward_backward,
    make_dy,
    make_input,
    poisoned,
)

__all__ = ["poisoned"]  # a fixture


@pytest.mark.parametrize("unique", (False, True), ids=("grouped", "unique"))
@pytest.mark.parametrize("tail", (0, 6))
@pytest.mark.parametrize("weighting", ("output", "activation"))
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_the_oracle(
    name: str, counts: tuple[int, ...], weighting: str, tail: int, unique: bool, poisoned: None
) -> None:
    """Any number of local experts (sgl-project/sglang#22583, PaddlePaddle/FastDeploy#4102), one too
    (vllm-project/vllm-ascend#3005), and NaN in the tail and in all fresh memory (huggingface/transformers#45621)."""
    experts = experts_for(name, len(counts), weighting=weighting)
    inp = make_input(counts, 16, torch.float32, tail=tail, unique=unique)
    dy = make_dy(inp)
    got = forward_backward(experts, inp, dy)
    assert_close(got, expected(experts, inp, dy), torch.float32)
    total = sum(counts)
    assert got["dweights"][total:].count_nonzero() == 0
    assert unique or got["dx"][total:].count_nonzero() == 0


@pytest.mark.parametrize("weighting", ("output", "activation"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float64"))
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_equal_the_oracle(name: str, dtype: str, weighting: str, poisoned: None) -> None:
    if (name, dtype) == ("torch", "float64"):
        with pytest.raises(Unavailable, match=r"cannot compute in float64.*set experts = 'loop'"):
            experts_for(name, 3, dtype=dtype)
        return
    experts = experts_for(name, 3, 32, 24, dtype=dtype, weighting=weighting)
    inp = make_input((9, 0, 14), 32, getattr(torch, dtype), tail=5, unique=True)
    dy = make_dy(inp)
    got = forward_backward(experts, inp, dy)
    assert got["dweights"].dtype == torch.float32
    assert {got[key].dtype for key in got if key != "dweights"} == {inp.source.dtype}
    # the float32 gradient of the weights is the one result of a float64 run that is rounded to float32
    bound = torch.float32 if dtype == "float64" else inp.source.dtype
    assert_close(got, expected(experts, inp, dy), bound)


@pytest.mark.parametrize("weighting", ("output", "activation"))
def test_gradcheck_of_the_loop_in_float64(weighting: str) -> None:
    experts = experts_for("loop", 3, 4, 3, dtype="float64", weighting=weighting)
    base = make_input((2, 0, 3), 4, torch.float64, tail=2)

    def valid_rows(x: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        inp = dataclasses.replace(base, source=x, row_weights=weights)
        parameters = {"w_gate_up": w_gate_up, "w_down": w_down}
        return torch.func.functional_call(experts, parameters, (inp,))[:5]

    x, weights = (t.detach().nan_to_num(1.0).double().requires_grad_() for t in (base.source, base.row_weights))
    assert torch.autograd.gradcheck(valid_rows, (x, weights, experts.w_gate_up, experts.w_down))


@pytest.mark.parametrize(("hidden", "inner"), ((5, 3), (1, 1), (16, 9), (7, 8), (30, 30)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("weighting", ("output", "activation"))
def test_sizes_that_are_no_multiple_of_16_bytes(
    hidden: int, inner: int, dtype: torch.dtype, weighting: str, poisoned: None
) -> None:
    keys = {"weighting": weighting, "dtype": str(dtype).removeprefix("torch.")}
    experts = experts_for("torch", 3, hidden, inner, **keys)
    inp = make_input((9, 0, 14), hidden, dtype, tail=5, unique=True)
    dy = make_dy(inp)
    got = forward_backward(experts, inp, dy)
    assert_close(got, expected(experts, inp, dy), dtype)
    assert experts(inp).is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_on_dirty_memory(name: str, poisoned: None) -> None:
    """Step 1 of a run on fresh memory is clean; later steps reuse what others freed (pytorch/pytorch#193633,
    huggingface/transformers#48205). Three steps of SGD on changing routes equal the same steps on clean memory."""

    def train() -> list[Tensor]:
        experts = experts_for(name, 4)
        for step, counts in enumerate(((5, 0, 1, 2), (0, 8, 0, 0), (1, 1, 6, 0))):
            inp = make_input(counts, 16, torch.float32, tail=4, unique=step != 1, seed=step)
            forward_backward(experts, inp, make_dy(inp))
            for parameter in experts.parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all()
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
        return [parameter.detach() for parameter in experts.parameters()]

    dirty = train()
    torch.use_deterministic_algorithms(False)
    for got, want in zip(dirty, train(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("counts", ((4, 0, 3), (0, 0, 0)), ids=("one_empty", "all_empty"))
@pytest.mark.parametrize("tail", (0, 3))
@pytest.mark.parametrize("name", NAMES)
def test_empty_experts_get_zero_gradients_never_none(
    name: str, counts: tuple[int, ...], tail: int, poisoned: None
) -> None:
    """A parameter without a gradient stops DistributedDataParallel (jingyaogong/minimind#835), and an output that
    leaves the graph stops the peers in backward (NVIDIA-NeMo/Automodel#935)."""
    experts = experts_for(name, 3)
    inp = make_input(counts, 16, torch.float32, tail=tail)
    y = experts(inp)
    assert y.shape == (inp.capacity, 16) and y.grad_fn is not None
    y.backward(make_dy(inp))
    for parameter in experts.parameters():
        assert parameter.grad is not None
        for local, count in enumerate(counts):
            assert (parameter.grad[local].count_nonzero() == 0) == (count == 0)
    assert inp.source.grad is not None and inp.row_weights.grad is not None


@pytest.mark.parametrize(
    ("trained", "products"),
    (
        (("x", "weights", "w_gate_up", "w_down"), 4),
        (("x", "weights"), 2),
        (("weights",), 1),
        (("x",), 2),
        (("w_down",), 1),
        (("w_gate_up",), 2),
    ),
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_frozen_parts(trained: tuple[str, ...], products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen gets no gradient and costs no product; what is left, the router's gradient first, stays exact."""
    experts = experts_for("torch", 3)
    inp = make_input((3, 0, 7), 16, torch.float32, tail=2)
    dy = make_dy(inp)
    want = expected(experts, inp, dy)
    leaves = {"x": inp.source, "weights": inp.row_weights, "w_gate_up": experts.w_gate_up, "w_down": experts.w_down}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in trained)
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **keys: calls.append(1) or grouped_mm(*args, **keys))
    got = forward_backward(experts, inp, dy)
    keys = {"x": "dx", "weights": "dweights"}
    assert_close(got, {key: want[key] for key in ("y", *(keys.get(name, name) for name in trained))}, torch.float32)
    assert len(calls) == 2 + products


@pytest.mark.parametrize("unique", (False, True))
def test_bytes_kept_for_backward_are_those_of_the_docstring(unique: bool) -> None:
    """No [N, H] beside the rows themselves, and unique rows are kept as they came."""
    experts = experts_for("torch", 2, 64, 16, dtype="bfloat16")
    inp = make_input((40, 24), 64, torch.bfloat16, unique=unique)
    kept: dict[int, int] = {}

    def record(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        y = experts(inp)
    num_rows, integers = 64, 4 * 3 + (4 * 64 + 4 * 64 if unique else 0)
    parameters = sum(p.numel() * 2 for p in experts.parameters())
    rows = (num_rows // 2 if unique else num_rows) * 64 * 2
    assert sum(kept.values()) == 2 * 16 * num_rows * 2 + rows + 4 * num_rows + parameters + integers
    del y


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_gradient_of_the_row_weights_is_summed_in_float32(dtype: torch.dtype) -> None:
    a, b = (torch.randn(3, 512, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    before = a.clone()
    want = (a.double() * b.double()).sum(1)
    got = row_dot(a, b)
    assert got.dtype == torch.float32 and torch.equal(a, before)
    assert ((got - want).abs() <= 16 * torch.finfo(torch.float32).eps * a.double().norm() * b.double().norm()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighting", ("output", "activation"))
def test_row_weights_multiply_in_float32(name: str, weighting: str) -> None:
    """A weight that bfloat16 cannot hold is not rounded before the product (pytorch/torchtitan#2107)."""
    experts = experts_for(name, 1, 8, 8, dtype="bfloat16", weighting=weighting)
    with torch.no_grad():  # gate 128 * x saturates silu, up 2^-7 * x undoes it: activation = x^2, output = x^2
        experts.w_gate_up.copy_(torch.cat([torch.eye(8) * 128, torch.eye(8) / 128])[None])
        experts.w_down.copy_(torch.eye(8)[None])
    inp = make_input((2,), 8, torch.bfloat16)
    with torch.no_grad():
        inp.source.copy_(torch.tensor([1.0, 1.5]).view(2, 1).expand(2, 8))
        inp.row_weights.copy_(torch.tensor([1.0 + 2.0**-9, 1.0 + 2.0**-8]))
    # in float32: 1 + 2^-9 rounds to 1; 2.25 * (1 + 2^-8) = 2.2588 rounds to 2.265625; a bfloat16 weight would give 2.25
    assert torch.equal(experts(inp), torch.tensor([1.0, 2.265625]).view(2, 1).expand(2, 8).bfloat16())


def test_torch_equals_loop() -> None:
    results = []
    for name in NAMES:
        experts = experts_for(name, 3, 32, 24)
        inp = make_input((9, 0, 14), 32, torch.float32)
        results.append(forward_backward(experts, inp, make_dy(inp)))
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_weight_layout(name: str) -> None:
    """Gate half first: expert 0 of H = I = 1 computes down * silu(gate * x) * up * x, times the row weight."""
    experts = experts_for(name, 2, 1, 1)
    with torch.no_grad():
        experts.w_gate_up.copy_(torch.tensor([[[2.0], [3.0]], [[0.0], [1.0]]]))
        experts.w_down.copy_(torch.tensor([[[5.0]], [[7.0]]]))
    inp = make_input((1, 1), 1, torch.float32)
    with torch.no_grad():
        inp.source.copy_(torch.tensor([[0.5], [4.0]]))
        inp.row_weights.copy_(torch.tensor([0.25, 1.0]))
    silu = 1.0 / (1.0 + torch.tensor(-1.0).exp())
    torch.testing.assert_close(experts(inp), torch.tensor([[0.25 * 5.0 * silu * 1.5], [0.0]]))
    assert {n: tuple(p.shape) for n, p in experts.named_parameters()} == {"w_gate_up": (2, 2, 1), "w_down": (2, 1, 1)}


def test_grouped_experts_compute_in_their_own_dtype_under_autocast() -> None:
    experts = experts_for("torch", 2)
    inp = make_input((2, 3), 16, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(inp)
    assert y.dtype == torch.float32
    assert torch.equal(y, experts(inp))


def test_second_derivative_is_refused() -> None:
    experts = experts_for("torch", 2)
    inp = make_input((2, 3), 16, torch.float32)
    (grad,) = torch.autograd.grad(experts(inp).square().sum(), inp.source, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
