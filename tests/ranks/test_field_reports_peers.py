"""Field reports of ranks that do not come, come otherwise or bring no input. See docs/field_reports.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import InputError, MoEConfig, MoELayer, PeerError, Routing
from moe_ep.testing.ranks import RankPool

H = 8
BASE: dict[str, Any] = dict(hidden_size=H, expert_intermediate_size=12, num_experts=8, top_k=2, init_std=0.5)
DISPATCHERS = ["all2all", "agrs"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def make(group: dist.ProcessGroup | None, max_tokens: int = 128, **changes: Any) -> MoELayer:
    layer = MoELayer(MoEConfig(**(BASE | dict(max_tokens=max_tokens) | changes)), group, layer_index=7)
    layer.reset_parameters(5)
    return layer


def rows(count: int, *key: int) -> Tensor:
    seed = sum(part * 1009**place for place, part in enumerate(key))
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def assert_near(got: Tensor, want: Tensor) -> None:
    """Equal up to float32 summation order: 2e-6 of the tensor's norm (measured 2e-7)."""
    assert got.shape == want.shape
    assert (got - want).double().norm() <= 2e-6 * want.double().norm() + 1e-12


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(PeerError) as caught:
        act()
    return str(caught.value)


def absent(group: dist.ProcessGroup, rank: int, dispatcher: str, phase: str) -> str:
    """Rank 1 lives on but does not come to the collective of one phase; the group waits for a moment."""
    make(None)(rows(1))  # what a first forward imports takes longer than a second
    dist.barrier(group=group)
    seconds = 3 if phase in ("experts", "backward") else 1  # these two have exchanges before, on a busy machine
    ranks = dist.get_process_group_ranks(group)
    short = dist.new_group(ranks, timeout=timedelta(seconds=seconds), use_local_synchronization=True)
    layer = None if phase == "construction" else make(short, dispatcher=dispatcher)
    y = layer(rows(3))[0] if layer and phase == "backward" else None
    if rank == 1:
        if layer and phase == "experts":
            layer.launch_dispatch(rows(3))  # and no combine behind it
        return ""
    if layer is None:
        return refusal(lambda: make(short, dispatcher=dispatcher))
    if phase == "fault record":
        layer.dispatcher.faults(CPU)
        return refusal(layer.dispatcher.raise_if_faulted)
    return refusal((lambda: layer(rows(3))) if y is None else y.sum().backward)


PHASES = {
    "construction": "agreement about MoE layer 7",
    "forward": "exchange of {early} of layer 7, micro-batch 0",
    "experts": "combine of layer 7, micro-batch 0",
    "backward": "backward of combine of layer 7, micro-batch 0",
    "fault record": "exchange of fault records",
}


def absent_in_pairs(group: dist.ProcessGroup, rank: int, phase: str) -> str:
    """Each dispatcher on two ranks of its own, so that both wait at the same time."""
    first = rank // 2 * 2
    pair = dist.new_group([first, first + 1], use_local_synchronization=True)
    return absent(pair, rank - first, DISPATCHERS[rank // 2], phase)


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_does_not_come_is_an_error_that_names_the_phase(pool: RankPool, phase: str) -> None:
    """microsoft/Tutel#182, NVIDIA/Model-Optimizer#1966, yiqiao-yin/deepspeed-course#28: evaluation on one rank only;
    NVIDIA/TensorRT-LLM#17376: a rank that is slower than the timeout, which is the group's own."""
    assert len(DISPATCHERS) == 2
    said = pool.run(absent_in_pairs, phase, timeout_s=30)
    for dispatcher, message in zip(DISPATCHERS, said[::2], strict=True):
        wanted = PHASES[phase].format(early="counts" if dispatcher == "all2all" else "ids")
        assert message.startswith(f"{wanted}: communication with the other ranks failed ("), dispatcher
        assert "took longer than the group's timeout, or did not make the same call" in message, dispatcher


def train_here_evaluate_there(group: dist.ProcessGroup, rank: int, dispatcher: str) -> None:
    layer = make(group, dispatcher=dispatcher)
    with torch.set_grad_enabled(rank == 0), pytest.raises(PeerError) as caught:
        layer(rows(3))
    assert str(caught.value).startswith("layer 7, micro-batch 0: rank 1 of 2 runs under no_grad and the others do not")
    with torch.no_grad():
        layer(rows(3))
    layer(rows(3))[0].sum().backward()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_one_rank_that_evaluates_while_the_other_trains(pool: RankPool, dispatcher: str) -> None:
    """microsoft/Tutel#182: their forwards would pair up, and one's backward would meet the other's next forward."""
    pool.run(train_here_evaluate_there, dispatcher, num_ranks=2, timeout_s=20)


ODD_INPUTS: dict[str, tuple[Any, Any, str]] = {
    "nothing": (None, None, "x and valid must be dense tensors, got NoneType"),
    "a list": ([1.0] * H, None, "x and valid must be dense tensors, got list"),
    "a scalar": (torch.tensor(1.0), None, "x must be [..., 8] (hidden_size), got ()"),
    "sparse": (torch.eye(H).to_sparse(), None, "x and valid must be dense tensors, got torch.sparse_coo"),
    "whole numbers": (torch.ones(3, H, dtype=torch.int64), None, "x must be a float tensor [T, 8]"),
    "on no device": (torch.empty(3, H, device="meta"), None, "x is on meta, the router's weight on cpu"),
    "a list of flags": (torch.ones(3, H), [True] * 3, "x and valid must be dense tensors, got list"),
    "flags of another shape": (torch.ones(3, H), torch.ones(4, dtype=torch.bool), "valid must be (3,)"),
    "flags as numbers": (torch.ones(3, H), torch.ones(3), "valid_T must be bool [3]"),
}


def odd_input(group: dist.ProcessGroup, rank: int, dispatcher: str) -> None:
    layer = make(group, dispatcher=dispatcher)
    for name, (x, valid, said) in ODD_INPUTS.items():
        given = (x, valid) if rank == 1 else (rows(3), None)
        with pytest.raises((InputError, PeerError)) as caught:
            layer(*given)
        assert type(caught.value) is (InputError if rank == 1 else PeerError), name
        assert (said if rank == 1 else "rank 1 reported a fault") in str(caught.value), name
        assert rank == 0 or str(caught.value).startswith("layer 7, micro-batch 0: "), name
    routing = Routing(expert_ids=torch.zeros(3, 2, dtype=torch.int64), weights=torch.ones(3, 2), num_experts=8)
    with pytest.raises((InputError, PeerError)) as caught:
        layer.dispatcher.dispatch(layer.dispatcher.dispatch_preprocess(rows(3) if rank == 0 else None, routing))
    assert ("x must be a dense tensor" if rank == 1 else "rank 1 reported a fault") in str(caught.value)
    assert layer(rows(3))[0].shape == (3, H), "all go on"


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_what_is_no_input_at_all_on_one_rank(pool: RankPool, dispatcher: str) -> None:
    """Tencent-Hunyuan/UniRL#226: whatever one rank hands in, the others hear of it in the same call and all go on."""
    pool.run(odd_input, dispatcher, num_ranks=2, timeout_s=30)


def uneven_evaluation(group: dist.ProcessGroup, rank: int, dispatcher: str) -> None:
    """3 batches here and 2 there: the rank with fewer fills up with empty ones."""
    layer, alone = make(group, dispatcher=dispatcher).eval(), make(None).eval()
    batches = [4, 4, 1] if rank == 0 else [4, 2]
    most = torch.tensor(len(batches))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    with torch.no_grad():
        for number in range(int(most)):
            x = rows(batches[number] if number < len(batches) else 0, rank, number)
            assert_near(layer(x)[0], alone(x)[0])


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_uneven_evaluation_with_empty_batches(pool: RankPool, dispatcher: str) -> None:
    """microsoft/Tutel#182: every rank calls the layer equally often, and an empty batch is a call."""
    pool.run(uneven_evaluation, dispatcher, num_ranks=2, timeout_s=20)
