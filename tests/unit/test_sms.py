"""SMs left free: the switch is set around forward and backward, put back, and refused where it would do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ep import sms
from moe_ep.config import MoEConfig
from moe_ep.dispatch import build_dispatcher
from moe_ep.domino import DominoLayer, DominoStack
from moe_ep.errors import InputError, Unavailable
from moe_ep.expert_input import ExpertInput
from moe_ep.experts_registry import build_experts
from moe_ep.grouped_mlp import grouped_swiglu
from moe_ep.layer import MoELayer
from moe_ep.sorted_routes import make_offsets

CONFIG = MoEConfig(hidden_size=8, expert_intermediate_size=8, num_experts=2, top_k=1, normalize_weights=False)


def rows() -> ExpertInput:
    counts = torch.tensor([2, 3], dtype=torch.int32)
    return ExpertInput(
        source=torch.ones(5, 8, requires_grad=True), row_weights=torch.ones(5, requires_grad=True), capacity=5,
        offsets=make_offsets(counts), tokens_per_expert=counts,
    )  # fmt: skip


def test_the_switch_is_put_back_also_after_an_error_and_from_inside() -> None:
    assert sms.left_free() == 0
    with pytest.raises(ZeroDivisionError), sms.leave_free(8):
        with sms.leave_free(4):
            assert sms.left_free() == 4
        with sms.leave_free(0):
            assert sms.left_free() == 8, "0 leaves what stands"
        _ = 1 / 0
    assert sms.left_free() == 0


def test_every_gemm_of_forward_and_backward_leaves_them_free(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = F.grouped_mm

    def noting(*args: Any, **options: Any) -> Tensor:
        seen.append(sms.left_free())
        return real(*args, **options)

    monkeypatch.setattr(F, "grouped_mm", noting)
    w_gate_up, w_down = torch.ones(2, 16, 8, requires_grad=True), torch.ones(2, 8, 8, requires_grad=True)
    for free in (6, 0):
        seen.clear()
        with sms.leave_free(free):
            y = grouped_swiglu(rows(), w_gate_up, w_down, weight_activation=False)
        y.sum().backward()
        assert seen == [free] * 6 and sms.left_free() == 0


@pytest.mark.parametrize(("name", "reason"), [("torch", "on cpu, which has no SMs"), ("loop", "'loop' cannot limit")])
def test_experts_refuse_what_would_have_no_effect(name: str, reason: str) -> None:
    experts = build_experts(MoEConfig(**(vars_of(CONFIG) | {"experts": name})), 2, 0, 0)
    with pytest.raises(Unavailable, match=f"reserve_sms = 8 would have no effect: .*{reason}.*set it to 0"):
        experts(rows(), reserve_sms=8)
    assert experts(rows(), reserve_sms=0).shape == (5, 8)


def test_a_number_that_no_gpu_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = build_experts(CONFIG, 2, 0, 0)
    monkeypatch.setattr(type(experts), "reserve_refusal", lambda self, device: None)
    monkeypatch.setattr("moe_ep.experts_checks.num_sms", lambda device: 132)
    for wrong in (132, -1):
        with pytest.raises(InputError, match=rf"reserve_sms = {wrong} must lie in \[0, 132\)"):
            experts(rows(), reserve_sms=wrong)


def test_grouped_mm_can_be_limited_in_bfloat16_on_two_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(sms, "_capability", lambda device: (9, 0))
    assert sms.grouped_mm_refusal(cuda, torch.bfloat16) is None
    assert "in bfloat16 only, not in torch.float32" in str(sms.grouped_mm_refusal(cuda, torch.float32))
    monkeypatch.setattr(sms, "_capability", lambda device: (8, 0))
    assert "9.0 and 10.0 only, this one has 8.0" in str(sms.grouped_mm_refusal(cuda, torch.bfloat16))


class Bare(DominoLayer):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(CONFIG)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(("wanted", "num", "expected"), [(None, 1, 0), (None, 3, 16), (5, 1, 0), (5, 3, 5), (0, 3, 0)])
def test_a_layer_reserves_where_others_are_under_way(
    wanted: int | None, num: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: what the dispatcher declares, if the experts can."""
    layer = Bare()
    assert layer.moe is not None
    layer.moe.reserve_sms = wanted
    seen: list[int] = []
    monkeypatch.setattr("moe_ep.experts.check_reserve", lambda experts, num, device: None)
    layer.moe.experts.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["reserve_sms"]), with_kwargs=True
    )
    monkeypatch.setattr(type(layer.moe.dispatcher), "comm_sms", 16)
    xs = [torch.ones(3, 8) for _ in range(num)]
    DominoStack([layer])(xs)
    assert seen == [0] * num if wanted is None else [expected] * num, (
        "experts on a CPU leave nothing free by themselves"
    )
    seen.clear()
    monkeypatch.setattr(type(layer.moe.experts), "reserve_refusal", lambda self, device: None)
    DominoStack([layer])(xs)
    assert seen == [expected] * num


def test_a_dispatcher_of_one_rank_needs_none() -> None:
    assert build_dispatcher(CONFIG.dispatch()).comm_sms == 0


def vars_of(config: MoEConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
