"""Experts on quack against the float64 oracle, through a double of quack that holds calls to its contracts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import doctor, quack_experts, quack_library, sms
from moe_ep.config import MoEConfig
from moe_ep.errors import InputError, Unavailable
from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts
from moe_ep.experts_registry import build_experts, register_experts
from moe_ep.quack_experts import compile_kernels
from moe_ep.quack_library import Plans
from moe_ep.quack_mlp import quack_swiglu
from tests.unit.quack_double import Double
from tests.unit.small_experts import (
    COUNTS,
    assert_close,
    expected,
    experts_for,
    forward_backward,
    make_dy,
    make_input,
    poisoned,
)

__all__ = ["poisoned"]  # a fixture
BF16 = torch.bfloat16


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Double:
    """A double in quack's place, and a CPU in a GPU's."""
    double = Double()
    monkeypatch.setattr(quack_library, "machine_reasons", list)
    monkeypatch.setattr(quack_library, "require_device", lambda device: None)
    monkeypatch.setattr(quack_library, "load", lambda: (double.library, ""))
    monkeypatch.setattr(quack_experts, "compile_kernels", lambda *_: None)
    return double


def build(num_local: int, hidden: int = 16, inner: int = 8, **keys: Any) -> GroupedExperts:
    return experts_for("quack", num_local, hidden, inner, **{"dtype": "bfloat16", **keys})


@pytest.mark.parametrize("unique", (False, True), ids=("grouped", "unique"))
@pytest.mark.parametrize("tail", (0, 6))
@pytest.mark.parametrize("weighting", ("output", "activation"))
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_equals_the_oracle(
    counts: tuple[int, ...], weighting: str, tail: int, unique: bool, quack: Double, poisoned: None
) -> None:
    """Values and all gradients, with NaN in the tail and in all fresh memory; gate and up sizes differ from H."""
    experts = build(len(counts), weighting=weighting)
    inp = make_input(counts, 16, BF16, tail=tail, unique=unique)
    dy = make_dy(inp)
    got = forward_backward(experts, inp, dy)
    assert_close(got, expected(experts, inp, dy), BF16)
    total = sum(counts)
    assert got["dweights"][total:].count_nonzero() == 0
    assert unique or got["dx"][total:].count_nonzero() == 0


def test_float16(quack: Double, poisoned: None) -> None:
    experts = build(3, 32, 24, dtype="float16")
    inp = make_input((9, 0, 14), 32, torch.float16, tail=5, unique=True)
    dy = make_dy(inp)
    assert_close(forward_backward(experts, inp, dy), expected(experts, inp, dy), torch.float16)


def shuffled_input(counts: tuple[int, ...], num_source: int, tail: int) -> ExpertInput:
    """Any expert row from any source row, some source rows twice in one expert, some nowhere."""
    gen = torch.Generator().manual_seed(3)
    inp = make_input(counts, 16, BF16, tail=tail)
    total = sum(counts)
    index = torch.full((total + tail,), -1, dtype=torch.int32)
    index[:total] = torch.randint(num_source - 1, (total,), generator=gen, dtype=torch.int32)  # the last: nowhere
    places = [(index == row).nonzero().flatten().tolist() for row in range(num_source)]
    width = max(map(len, places))
    positions = torch.tensor([place + [-1] * (width - len(place)) for place in places], dtype=torch.int32)
    source = torch.randn(num_source, 16, generator=gen).to(BF16).requires_grad_()
    return dataclasses.replace(inp, source=source, row_index=index, positions=positions)


def test_any_index(quack: Double, poisoned: None) -> None:
    experts = build(3)
    inp = shuffled_input((9, 0, 14), 8, 5)
    dy = make_dy(inp)
    got = forward_backward(experts, inp, dy)
    assert_close(got, expected(experts, inp, dy), BF16)
    assert got["dx"][-1].count_nonzero() == 0


@pytest.mark.parametrize("unique", (False, True), ids=("grouped", "unique"))
@pytest.mark.parametrize("split", (1, 2, 3))
def test_two_sets_of_weights_equal_one(split: int, unique: bool, quack: Double, poisoned: None) -> None:
    """A rank's own experts in one call and those in its replica slots in another: same bits, each set's gradients."""
    experts = build(4)
    inp = make_input((3, 0, 5, 4), 16, BF16, tail=3, unique=unique)
    dy = make_dy(inp)
    want = forward_backward(experts, inp, dy)
    sets = [tuple(p.detach()[part].clone().requires_grad_() for p in (experts.w_gate_up, experts.w_down))
            for part in (slice(split), slice(split, None))]  # fmt: skip
    inp = dataclasses.replace(inp, source=inp.source.detach().requires_grad_())
    inp = dataclasses.replace(inp, row_weights=inp.row_weights.detach().requires_grad_())
    y = quack_swiglu(inp, *sets, weight_activation=False)
    y.backward(dy)
    assert torch.equal(y[:12], want["y"]) and torch.equal(inp.source.grad, want["dx"])
    assert torch.equal(inp.row_weights.grad, want["dweights"])
    for place, name in enumerate(("w_gate_up", "w_down")):
        assert torch.equal(torch.cat([both[place].grad for both in sets]), want[name])


def test_sets_that_do_not_fit_the_rows(quack: Double) -> None:
    experts, inp = build(2), make_input((2, 3, 1), 16, BF16)
    both = (experts.w_gate_up, experts.w_down)
    with pytest.raises(
        InputError, match=r"sets of \[2\] experts came with rows for 3; give one set for the rank's own"
    ):
        quack_swiglu(inp, both, weight_activation=False)
    with pytest.raises(InputError, match=r"sets of \[2, 0\] experts"):
        quack_swiglu(make_input((2, 3), 16, BF16), both, (both[0][:0], both[1][:0]), weight_activation=False)


def test_no_source_rows_for_a_capacity(quack: Double, poisoned: None) -> None:
    experts = build(2)
    inp = make_input((0, 0), 16, BF16, tail=8, unique=True)
    assert inp.source.shape[0] == 0
    got = forward_backward(experts, inp, make_dy(inp))
    assert all(got[name].count_nonzero() == 0 for name in ("dweights", "w_gate_up", "w_down"))


def test_misaligned_memory_is_copied(quack: Double, poisoned: None) -> None:
    """Gradients that are expanded or strided, and offsets and rows that start between 16-byte units."""

    def moved(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape)

    experts, inp = build(3), make_input((9, 0, 14), 16, BF16, unique=True)
    assert inp.row_index is not None
    inp = dataclasses.replace(
        inp, source=moved(inp.source).requires_grad_(), row_weights=moved(inp.row_weights).requires_grad_(),
        offsets=moved(inp.offsets), row_index=moved(inp.row_index),
    )  # fmt: skip
    assert inp.source.data_ptr() % 16 and inp.offsets.data_ptr() % 16
    dy = torch.randn(16).to(BF16).expand(23, 16)
    assert_close(forward_backward(experts, inp, dy), expected(experts, inp, dy), BF16)


FROZEN = ("source", "row_weights", "w_gate_up", "w_down")


@pytest.mark.parametrize("wanted", FROZEN)
def test_one_gradient_alone(wanted: str, quack: Double, poisoned: None) -> None:
    experts, inp = build(3), make_input((4, 0, 7), 16, BF16, tail=2, unique=True)
    dy = make_dy(inp)
    want = forward_backward(experts, inp, dy)
    tensors = {"source": inp.source, "row_weights": inp.row_weights, **dict(experts.named_parameters())}
    for name, tensor in tensors.items():
        tensor.grad = None
        tensor.requires_grad_(name == wanted)
    experts(inp).backward(dy)
    grads = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    assert list(grads) == [wanted]
    assert torch.equal(grads[wanted], want[{"source": "dx", "row_weights": "dweights"}.get(wanted, wanted)])


def test_launches_and_what_is_kept(quack: Double) -> None:
    """Two kernels forward, four backward, no expanded rows; without gradients the pre-activation is not stored."""
    experts, inp = build(2, 32, 8), make_input((6, 10), 32, BF16, unique=True)
    dy = make_dy(inp)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = experts(inp)
    assert quack.calls == ["gemm_act", "norm_act_mod"]
    assert sorted(t.numel() for t in kept if t.is_floating_point()) == sorted(
        (inp.source.numel(), 16, 16 * 2 * 8, experts.w_gate_up.numel(), experts.w_down.numel())
    )
    y.backward(dy)
    assert quack.calls[2:] == ["gemm_dact", "gemm", "gemm", "gemm"]
    with torch.no_grad():
        assert torch.equal(experts(inp), y)


@pytest.mark.parametrize("weight_activation", (False, True))
def test_every_kernel_runs_once_at_construction(weight_activation: bool, quack: Double) -> None:
    """With rows and without, with gradients and without; what goes wrong there is said as a refusal."""
    compile_kernels.cache_clear()
    with torch.device("meta"), torch.no_grad():  # as a model is built
        compile_kernels(BF16, weight_activation, "cpu")
    down = "gemm" if weight_activation else "norm_act_mod"
    forward, backward = ["gemm_act", down], ["gemm_dact", "gemm", "gemm", "gemm"]
    assert quack.calls == 2 * [*forward, *forward, *backward]
    compile_kernels(BF16, weight_activation, "cpu")
    assert len(quack.calls) == 16, "once in a process"
    compile_kernels.cache_clear()
    with pytest.raises(Unavailable, match=r"cannot be compiled or run with .*AssertionError: .*set experts = 'torch'"):
        compile_kernels(torch.float32, weight_activation, "cpu")


def test_second_derivative_is_refused(quack: Double) -> None:
    experts, inp = build(2), make_input((2, 3), 16, BF16)
    (grad,) = torch.autograd.grad(experts(inp).float().square().sum(), inp.source, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.float().sum().backward()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"dtype": "float32"}, "its fused kernels take bfloat16 and float16, not float32"),
        ({"hidden": 20}, "hidden_size = 20 must be a multiple of 8"),
        ({"inner": 12}, "expert_intermediate_size = 12 must be a multiple of 8"),
    ],
)
def test_what_the_kernels_do_not_take(keys: dict[str, Any], sentence: str, quack: Double) -> None:
    with pytest.raises(Unavailable, match=f"experts = 'quack' cannot run here: {sentence}.*set experts = 'torch'"):
        build(2, **keys)


def test_this_machine_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="it needs a CUDA GPU, and torch finds none; or set experts = 'torch'"):
        build(2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert quack_library.machine_reasons() == [
        "its kernels are written for compute capability 9.0 and newer, this GPU has 8.9"
    ]
    found = doctor.examine_experts("quack")
    assert not found["usable"] and "this GPU has 8.9" in found["reasons"][0]
    with pytest.raises(Unavailable, match="got rows on cpu: its kernels run on CUDA GPUs"):
        quack_library.require_device(torch.device("cpu"))


@pytest.fixture
def forget() -> Iterator[None]:
    """`load` looks once in a process."""
    quack_library.load.cache_clear()
    yield
    quack_library.load.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, origins: dict[str, str]) -> None:
    """Make modules findable at places that need not exist."""
    specs = {name: SimpleNamespace(origin=origin) for name, origin in origins.items()}
    monkeypatch.setattr(quack_library.importlib.util, "find_spec", specs.get)


def test_what_is_found(monkeypatch: pytest.MonkeyPatch, forget: None) -> None:
    """Nothing; half; a folder of another name, in which quack would fail at the first GEMM; a broken one."""
    plant(monkeypatch, {})
    assert "no module quack is installed; pip install 'quack-kernels" in quack_library.load()[1]
    quack_library.load.cache_clear()
    plant(monkeypatch, {"quack": "/a/quack/__init__.py"})
    assert "no module cutlass is installed" in quack_library.load()[1]
    assert quack_library.findings() == [f"quack: no module cutlass is installed; {quack_library.INSTALL}"]
    quack_library.load.cache_clear()
    plant(monkeypatch, {"quack": "/a/quack/__init__.py", "cutlass": "/a/dsl/cutlass/__init__.py"})
    assert "outside of any folder called site-packages" in quack_library.load()[1]
    assert "no fail-closed semantic key" in quack_library.findings()[1]
    quack_library.load.cache_clear()
    plant(monkeypatch, {"quack": "/a/site-packages/quack.py", "cutlass": "/a/site-packages/x/cutlass.py"})
    monkeypatch.setattr(quack_library.importlib, "import_module", lambda name: SimpleNamespace())
    assert "it cannot be used: AttributeError" in quack_library.load()[1]
    assert len(quack_library.findings()) == 1


def test_a_limit_keeps_its_plans_apart() -> None:
    """A plan holds the number of clusters of its making: other numbers need other plans, and come back to the same."""
    module, epilogues = SimpleNamespace(plans={}, get_max_active_clusters=lambda size, **_: 132 // size), []
    plans = Plans((module,), lambda: [(module, "plans"), *((e, "plans") for e in epilogues)])

    def launch(size: int = 2) -> int:
        return int(module.plans.setdefault(size, module.get_max_active_clusters(size, device_id=0)))

    assert launch() == 66
    with plans.limited(5):
        assert launch() == 63
        epilogues.append(SimpleNamespace(plans={"made": 63}))
        with plans.limited(200):
            assert launch() == 1
        assert launch() == 63 and epilogues[0].plans == {"made": 63}
    assert launch() == 66 and epilogues[0].plans == {}
    with plans.limited(5):
        assert module.plans == {2: 63} and epilogues[0].plans == {"made": 63}
    module.plans = dict.fromkeys(range(5000))
    plans.forget()
    assert module.plans == {}


def test_the_limit_of_forward_holds_in_backward(quack: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(plans={}, get_max_active_clusters=lambda size: 66)
    plans = Plans((module,), lambda: [(module, "plans")])
    library = dataclasses.replace(quack.library, plans=plans)
    seen: list[int] = []

    def gemm(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(plans.left_free)
        return quack.library.gemm(*args, **kwargs)

    monkeypatch.setattr(quack_library, "load", lambda: (dataclasses.replace(library, gemm=gemm), ""))
    experts, inp = build(2), make_input((2, 3), 16, BF16)
    with sms.leave_free(7):
        y = experts.compute(inp)
    y.backward(make_dy(inp))
    assert seen == [7, 7, 7] and plans.left_free == 0


def test_where_a_limit_is_refused(quack: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, cuda = build(2), torch.device("cuda")
    assert experts.reserve_refusal(torch.device("cpu")) == "tensors are on cpu, which has no SMs"
    assert "keeps its launch plans where moe_ep does not find them" in str(experts.reserve_refusal(cuda))
    library = dataclasses.replace(quack.library, plans=Plans((), list))
    for capability, refused in (((9, 0), False), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert bool(quack_library.limit_refusal(cuda, library)) == refused


def test_the_name_is_taken_before_it_is_imported() -> None:
    from moe_ep.errors import RecipeError

    with pytest.raises(RecipeError, match="'quack' are moe_ep's own"):
        register_experts("quack")(GroupedExperts)


def test_a_layer_learns_the_same_as_with_torch(quack: Double) -> None:
    config = MoEConfig(hidden_size=16, expert_intermediate_size=8, num_experts=2, top_k=1, dtype="bfloat16")
    first, second = (build_experts(dataclasses.replace(config, experts=name), 2, 0, 0) for name in ("quack", "torch"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
