"""Experts of one rank against the float64 oracle: values, every gradient, NaN in tails, odd sizes, frozen parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep.activation import row_dot
from moe_ep.config import MoEConfig
from moe_ep.errors import InputError, RecipeError, Unavailable
from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts, register_experts
from moe_ep.grouped_mlp import pad_inputs
from moe_ep.shared_experts import SharedExperts
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


def test_aligned_sizes_are_not_copied() -> None:
    experts = experts_for("torch", 2, 16, 8, dtype="bfloat16")
    inp = make_input((2, 3), 16, torch.bfloat16)
    same = pad_inputs(inp, experts.w_gate_up, experts.w_down)
    assert same[0] is inp and same[1] is experts.w_gate_up and same[2] is experts.w_down
    odd = experts_for("torch", 2, 15, 9, dtype="bfloat16")
    wide = pad_inputs(make_input((2, 3), 15, torch.bfloat16), odd.w_gate_up, odd.w_down)
    assert [tuple(t.shape) for t in (wide[0].source, *wide[1:])] == [(5, 16), (2, 32, 16), (2, 16, 16)]


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


def test_refusals_of_the_registry() -> None:
    with pytest.raises(RecipeError, match=r"experts = 'toch' is not registered; did you mean 'torch'.*loop"):
        experts_for("toch", 2)
    with pytest.raises(RecipeError, match="'loop' are moe_ep's own"):
        register_experts("loop")(GroupedExperts)
    register_experts("test_twice")(GroupedExperts)
    with pytest.raises(RecipeError, match=r"'test_twice' are already registered, as .*GroupedExperts"):
        register_experts("test_twice")(GroupedExperts)
    config = MoEConfig(hidden_size=4, expert_intermediate_size=4, num_experts=4, top_k=1)
    for num_local, first in ((2, 3), (0, 0), (2, -1)):
        with pytest.raises(RecipeError, match=f"experts {first} to {first + num_local - 1} do not lie within"):
            build_experts(config, num_local, first, 0)
    with pytest.raises(Unavailable, match="float64"):
        experts_for("torch", 2).double()(make_input((1, 1), 16, torch.float64))


def test_a_registered_name_builds_its_class() -> None:
    class Doubled(GroupedExperts):
        def compute(self, inp: ExpertInput) -> Tensor:
            return 2 * inp.rows()

    register_experts("test_doubled")(Doubled)
    inp = make_input((1, 1), 16, torch.float32)
    assert torch.equal(experts_for("test_doubled", 2)(inp), 2 * inp.source)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    """Counts that describe other rows than were handed over would run tokens through a neighbouring expert
    (InternLM/xtuner#2053); weights are never cast silently (sgl-project/sglang#39351)."""
    experts = experts_for(name, 2)
    good = make_input((2, 3), 16, torch.float32)
    int32 = torch.int32
    bad = {
        "2 experts of H = 16 got rows .5, 15.": dict(source=torch.zeros(5, 15)),
        "rows are torch.bfloat16, the experts' weights torch.float32": dict(source=torch.zeros(5, 16).bfloat16()),
        "row weights must be float32, got torch.bfloat16": dict(row_weights=torch.zeros(5).bfloat16()),
        "row weights must be float32, got torch.float64": dict(row_weights=torch.zeros(5).double()),
        "5 expert rows came with row weights .4,.": dict(row_weights=torch.zeros(4)),
        "capacity 6; all three must be N": dict(capacity=6),
        "tokens_per_expert .1, 4., host counts .1, 4. and offsets .0, 2, 5.": dict(
            tokens_per_expert=torch.tensor([1, 4], dtype=int32)
        ),
        "host counts .3, 2.": dict(host_counts=(3, 2)),
        "of 5 rows contradict": dict(
            offsets=torch.tensor([0, 2, 8], dtype=int32), tokens_per_expert=torch.tensor([2, 6], dtype=int32)
        ),
        "for 3 experts": dict(tokens_per_expert=torch.tensor([2, 3, 0], dtype=int32)),
    }
    for message, change in bad.items():
        with pytest.raises(InputError, match=message):
            experts(dataclasses.replace(good, **change))


def test_initial_values_depend_on_the_global_expert_alone() -> None:
    """The loss of step 0 must not depend on how many ranks share the experts (NVIDIA-NeMo/Automodel#2676)."""
    config = MoEConfig(hidden_size=16, expert_intermediate_size=8, num_experts=4, top_k=1, init_std=0.5)
    whole = build_experts(config, 4, 0, 3)
    halves = [build_experts(config, 2, first, 3) for first in (0, 2)]
    low = build_experts(dataclasses.replace(config, dtype="bfloat16"), 1, 2, 3)
    for experts in (whole, *halves, low):
        experts.reset_parameters(7)
    for name in ("w_gate_up", "w_down"):
        value = getattr(whole, name)
        assert torch.equal(value, torch.cat([getattr(half, name) for half in halves]))
        assert torch.equal(value[2:3].bfloat16(), getattr(low, name))
        assert len({row.sum().item() for row in value}) == 4
    before = whole.w_down.detach().clone()
    assert abs(before.std().item() - 0.5) < 0.05
    whole.reset_parameters(8)
    assert not torch.equal(whole.w_down, before)
    assert not torch.equal(build_experts(config, 4, 0, 4).w_down, build_experts(config, 4, 0, 3).w_down)
    with pytest.raises(InputError, match="layer 4096"):
        build_experts(config, 4, 0, 4096)


def shared_config(**keys: Any) -> MoEConfig:
    keys = {"num_shared_experts": 2, "shared_intermediate_size": 3, "dtype": "float64", "init_std": 0.5, **keys}
    return MoEConfig(hidden_size=4, expert_intermediate_size=4, num_experts=2, top_k=1, **keys)


@pytest.mark.parametrize("gate", (False, True))
def test_shared_experts(gate: bool) -> None:
    shared = SharedExperts(shared_config(shared_expert_gate=gate))
    assert [tuple(p.shape) for p in shared.parameters()] == [(12, 4), (4, 6), (4,)][: 2 + gate]
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    oracle = SwiGLUExperts(shared.w_gate_up.detach()[None], shared.w_down.detach()[None])
    want = torch.stack([oracle.forward(0, row) for row in x.detach()])
    if gate:
        assert shared.w_gate is not None
        want = want / (1 + (-(x.detach() * shared.w_gate.detach()).sum(1, keepdim=True)).exp())
    torch.testing.assert_close(shared(x), want)
    parameters = dict(shared.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(shared, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))
    y = shared(torch.zeros(0, 4, dtype=torch.float64))
    y.sum().backward()
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in shared.parameters())


def test_shared_experts_initial_values_and_refusals() -> None:
    one, other = SharedExperts(shared_config(), 1), SharedExperts(shared_config(), 2)
    assert torch.equal(one.w_down, SharedExperts(shared_config(), 1).w_down)
    assert not torch.equal(one.w_down, other.w_down)
    half = SharedExperts(shared_config(dtype="bfloat16", shared_expert_gate=True))
    assert half(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"H = 4 in torch.bfloat16 got x"):
        half(torch.ones(2, 4))
    with pytest.raises(RecipeError, match="num_shared_experts >= 1, got 0"):
        SharedExperts(shared_config(num_shared_experts=0, shared_intermediate_size=0))
