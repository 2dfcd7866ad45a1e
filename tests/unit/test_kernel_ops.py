"""The kernels' references, which are also the ops on a CPU: against the package's own torch code, and by hand."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_ep.kernels import balance, replica, router, routes, rows, split
from moe_ep.kernels import swiglu as swiglu_ops
from moe_ep.kernels.balance import balance_backward, balance_loss
from moe_ep.kernels.registry import KernelOp
from moe_ep.kernels.router import mask_logits, top_experts, weigh_backward, weigh_routes
from moe_ep.kernels.routes import count_message, regroup_rows, sort_routes
from moe_ep.kernels.rows import gather_rows, sum_rows
from moe_ep.kernels.split import split_bfloat16
from moe_ep.kernels.swiglu import scale_rows, swiglu, swiglu_backward, zero_tail
from torch._subclasses import FakeTensorMode

from moe_ep import scoring
from moe_ep.activation import activate, activate_backward, scale_, zero_tail_
from moe_ep.losses import balance_loss as package_loss
from moe_ep.permute import gather_rows as torch_gather
from moe_ep.permute import sum_rows as torch_sum
from moe_ep.sorted_routes import regroup as torch_regroup
from moe_ep.sorted_routes import sort_routes as torch_sort
from tools import bench_ops, bench_replica
from tools.shapes import Shape
from tools.synthetic_traces import Synthetic

from .test_permute import integers, routings

WITH_REFERENCE = (rows, routes, router, balance, split, swiglu_ops)


@given(routing=routings())
def test_sort_agrees_with_the_torch_path(routing: tuple[torch.Tensor, int]) -> None:
    ids, num_experts = routing
    want = torch_sort(ids, num_experts)
    row_token, row_slot, positions, counts, offsets, num_bad = sort_routes(ids, num_experts, 1)
    for one, other in (
        (row_token, want.row_token), (row_slot, want.row_slot), (positions, want.positions),
        (counts, want.counts), (offsets, want.offsets),
    ):  # fmt: skip
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert num_bad.item() == 0


@given(routing=routings(), alignment=st.integers(1, 5))
def test_alignment_pads_every_expert(routing: tuple[torch.Tensor, int], alignment: int) -> None:
    ids, num_experts = routing
    row_token, row_slot, positions, counts, offsets, _ = sort_routes(ids, num_experts, alignment)
    plain = torch_sort(ids, num_experts)
    assert all(start % alignment == 0 for start in offsets.tolist())
    ends = [*offsets.tolist()[1:]]
    for expert, (start, end, count) in enumerate(zip(offsets.tolist(), ends, counts.tolist(), strict=False)):
        first = int(plain.offsets[expert])
        assert row_slot[start : start + count].tolist() == plain.row_slot[first : first + count].tolist()
        assert row_slot[start + count : end].tolist() == [-1] * (end - start - count)
        assert end - start - count < alignment
    assert row_slot[offsets[-1] :].tolist() == [-1] * (row_slot.numel() - int(offsets[-1]))
    assert [slot for slot in row_slot.tolist() if slot >= 0] == [s for s in plain.row_slot.tolist() if s >= 0]
    flat = positions.flatten().tolist()
    assert all(row_slot[place] == slot for slot, place in enumerate(flat) if place >= 0)
    assert (row_token >= 0).tolist() == (row_slot >= 0).tolist()


def test_bad_ids_are_counted_and_have_no_route() -> None:
    _, _, positions, counts, _, num_bad = sort_routes(torch.tensor([[5, 0], [-7, -1]]), 2, 1)
    assert (positions.tolist(), counts.tolist(), num_bad.item()) == ([[-1, 0], [-1, -1]], [1, 0], 2)


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_regroup_agrees_with_the_torch_path(counts: list[list[int]]) -> None:
    counts_RL = torch.tensor(counts)
    total = int(counts_RL.sum())
    found = torch_regroup(counts_RL, total)
    as_they_are = torch.arange(total, dtype=torch.int32)
    assert [one is None for one in found] == [len(counts) == 1] * 2 + [False] * 2, "rows of one rank are in order"
    for one, other in zip(regroup_rows(counts_RL, total, 1), found, strict=True):
        want = as_they_are if other is None else other
        assert one.dtype == want.dtype and torch.equal(one, want)


def test_regroup_with_padding() -> None:
    order, places, offsets, tokens = regroup_rows(torch.tensor([[1, 2], [0, 2]]), 5, 2)
    assert order.tolist() == [0, -1, 1, 2, 3, 4, -1]
    assert places.tolist() == [0, 2, 3, 4, 5]
    assert (offsets.tolist(), tokens.tolist()) == ([0, 2, 6], [2, 4])


@given(routing=routings(), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
def test_rows_move_as_on_the_torch_path(routing: tuple[torch.Tensor, int], dtype: torch.dtype) -> None:
    ids, num_experts = routing
    routes = torch_sort(ids, num_experts)
    x = integers(ids.shape[0], 3, seed=1, dtype=dtype)
    rows = torch.randn(ids.numel(), 3, generator=torch.Generator().manual_seed(2)).to(dtype)
    args = (routes.row_token, routes.positions)
    assert torch.equal(gather_rows(x, *args, None), torch_gather(x, *args))
    assert torch.equal(sum_rows(rows, routes.positions, None), torch_sum(rows, *args))


def test_the_bound_cuts_what_is_read() -> None:
    rows = torch.tensor([[1.0], [2.0], [float("nan")]])
    positions, index = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32), torch.tensor([0, 1, 0], dtype=torch.int32)
    bound = torch.tensor([2], dtype=torch.int32)
    assert sum_rows(rows, positions, bound).tolist() == [[1.0], [2.0]]
    assert gather_rows(torch.tensor([[3.0], [4.0]]), index, positions, bound).tolist()[:2] == [[3.0], [4.0]]


@pytest.mark.parametrize(("bad_ids", "bad_tokens", "words"), [(0, 0, [0, 1, 9]), (3, 0, [4, 3, 9]), (3, 2, [6, 2, 9])])
def test_the_message_carries_counts_and_the_gravest_fault(bad_ids: int, bad_tokens: int, words: list[int]) -> None:
    faults = [torch.tensor(bad_ids), torch.tensor(bad_tokens)]
    message = count_message(torch.arange(6), faults, [4, 6], 1, 9, 2)
    assert message.shape == (2, 2, 6)
    assert message[0].tolist() == [[0, 1, 2, *words], [3, 4, 5, *words]]


def all_ops() -> dict[str, KernelOp]:
    """Every op, by its name in torch."""
    found = [value for module in (*WITH_REFERENCE, replica) for value in vars(module).values()]
    return {op.op._schema.name.removeprefix("moe_ep::"): op for op in found if isinstance(op, KernelOp)}


def test_ops_obey_their_schemas_and_fakes() -> None:
    checked = set()

    def check(op: Any, arguments: tuple[Any, ...]) -> None:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
        checked.add(op._schema.name.removeprefix("moe_ep::"))

    index, positions = torch.tensor([1, -1, 0]), torch.tensor([[2, -1], [0, -1]])
    check(gather_rows.op, (torch.randn(2, 5), index, positions, None))
    check(sum_rows.op, (torch.randn(3, 5), positions, torch.tensor([2], dtype=torch.int32)))
    check(sort_routes.op, (torch.tensor([[0, 4], [-1, 2]]), 3, 4))
    check(count_message.op, (torch.arange(4), [torch.tensor(2)], [7], 0, 5, 2))
    check(regroup_rows.op, (torch.tensor([[1, 2], [0, 4]]), 7, 2))
    weights, bound = torch.rand(3), torch.tensor([2], dtype=torch.int32)
    check(swiglu.op, (torch.randn(3, 8), weights, bound))
    check(swiglu_backward.op, (torch.randn(3, 4), torch.randn(3, 8), weights, None, True, False))
    check(scale_rows.op, (torch.randn(3, 8), weights, bound))
    check(zero_tail.op, (torch.randn(3, 8), bound))
    scores, ids, valid = torch.rand(3, 6), torch.tensor([[0, 5], [-1, 2], [3, 1]]), torch.tensor([True, True, False])
    check(mask_logits.op, (scores, valid, 2))
    check(top_experts.op, (scores, valid, 2, 2))
    check(weigh_routes.op, (scores, ids, True, 1e-20, 2.0))
    check(weigh_backward.op, (scores, ids, torch.rand(3, 2), True, 1e-20, 2.0))
    check(balance_loss.op, (scores, torch.arange(6), valid, 2))
    check(balance_backward.op, (torch.rand(6), valid, torch.tensor(2.0)))
    for beside in (False, True):
        check(split_bfloat16.op, (scores, [0, 1, 2, 0], beside))
    assert checked == all_ops().keys() - {"plan_replicas", "plan_fixed_rows", "reroute"}, "these on a GPU alone"


# what the benchmarks call each op; those that work on peer memory are no ops, and timed as stages
ROWS = {
    **{"mask_logits": "mask_logits", "top_experts": "top_experts", "weigh_routes": "weigh_routes"},
    **{"balance_loss": "balance_loss", "balance_backward": "balance_loss: fwd+bwd", "split_bfloat16": "split_bfloat16"},
    **{"weigh_backward": "weigh_routes: fwd+bwd", "sort_routes": "sort_routes", "regroup_rows": "regroup_rows"},
    **{"count_message": "count_message", "gather_rows": "gather_rows: expand", "sum_rows": "sum_rows: reduce"},
    **{"swiglu": "swiglu: forward", "swiglu_backward": "swiglu: backward"},
    **{"scale_rows": "clone, scale_rows", "zero_tail": "clone, zero_tail"},
    **{"plan_replicas": "plan", "plan_fixed_rows": "fixed_rows", "reroute": "reroute"},
}


def test_every_op_has_a_row_with_a_floor_in_the_benchmarks() -> None:
    assert ROWS.keys() == all_ops().keys()
    place = bench_ops.Place(Shape(T=8, H=16, I=8, E=4, K=2), torch.bfloat16, torch.device("cpu"))
    floors = {work.name: work.floor_us(4.2) for work in bench_ops.works(place)}
    spec = Synthetic(R=4, E=16, K=2, T=32, steps=1, micro_batches=1, skew=1.5)
    floors |= {row: bench_replica.moved_bytes(row, spec, 2) for row in bench_replica.TARGETS_US}
    assert all(floors[row] > 0 for row in ROWS.values())


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, True, True)])
def test_swiglu_and_its_backward_agree_with_the_torch_path(needs: tuple[bool, bool, bool]) -> None:
    generator = torch.Generator().manual_seed(3)
    h, q = torch.randn(7, 10, generator=generator), torch.randn(7, 5, generator=generator)
    weights, ends = torch.rand(7, generator=generator), torch.tensor([2, 7], dtype=torch.int32)
    close = torch.testing.assert_close
    close(swiglu(h, None, None), activate(h, None, ends, kernels=False))
    close(swiglu(h, weights, None), activate(h, weights, ends, kernels=False))
    want = activate_backward(q.clone(), h, weights, ends, needs, kernels=False)
    for one, other in zip(swiglu_backward(q, h, weights, None, *needs[:2]), want, strict=True):
        assert one.numel() == 0 if other is None else close(one, other) is None


def test_swiglu_backward_is_the_derivative_and_stops_at_the_bound() -> None:
    h = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, dtype=torch.float64, requires_grad=True)
    q = torch.randn(4, 3, dtype=torch.float64)
    gate, up = h.chunk(2, dim=-1)
    (torch.nn.functional.silu(gate) * up * weights[:, None]).backward(q)
    bound = torch.tensor([3], dtype=torch.int32)
    dh, _, d_weights = swiglu_backward(q, h.detach(), weights.detach(), bound, True, False)
    assert h.grad is not None and weights.grad is not None
    torch.testing.assert_close(dh[:3], h.grad[:3])
    torch.testing.assert_close(d_weights[:3], weights.grad[:3])
    assert dh[3:].count_nonzero() == 0


def test_scaling_and_zeroing_stop_at_the_bound() -> None:
    rows, weights, ends = torch.ones(3, 2).bfloat16(), torch.tensor([2.0, 3.0, 5.0]), torch.tensor([1, 2])
    scaled = rows.clone()
    scale_rows(scaled, weights, ends[-1:])
    assert scaled.tolist() == [[2.0, 2.0], [3.0, 3.0], [1.0, 1.0]]
    assert scale_(rows.clone(), weights, ends, kernels=False).tolist()[:2] == scaled.tolist()[:2]
    zero_tail(scaled, ends[-1:])
    assert scaled.tolist() == [[2.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    assert zero_tail_(rows.clone(), ends, None, kernels=False).tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


IDS = torch.tensor([[4, 0], [-1, 3], [2, 2], [-1, -1], [1, 3]])  # a missing route, a duplicate, none at all


@pytest.mark.parametrize(("normalize", "scale"), [(True, 1.0), (True, 2.5), (False, 1.0), (False, 0.5)])
def test_weights_loads_and_their_backward_agree_with_the_torch_path(normalize: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    scores, d_weights = torch.rand(5, 6, generator=generator), torch.randn(5, 2, generator=generator)
    scores[4] = 0  # the sum is below the smallest that is divided by
    leaf = scores.clone().requires_grad_()
    weights, load = scoring.weigh_routes(leaf, IDS, normalize=normalize, scale=scale)
    weights.backward(d_weights)
    found, counts = weigh_routes(scores, IDS, normalize, scoring.SMALLEST_SUM, scale)
    torch.testing.assert_close(found, weights.detach())
    assert counts.tolist() == load.tolist() == [1, 1, 2, 2, 1, 0]
    got = weigh_backward(scores, IDS, d_weights, normalize, scoring.SMALLEST_SUM, scale)
    torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True, True, False])])
def test_masks_and_counts_agree_with_the_torch_path(valid: torch.Tensor | None) -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(6))
    logits[0, 2], logits[1, 0], logits[3, 1] = float("nan"), float("inf"), -float("inf")
    masked, alive, counts = mask_logits(logits, valid)
    wanted = scoring.mask_logits(logits, valid)
    assert torch.equal(masked, wanted[0]) and torch.equal(alive, wanted[1])
    assert counts.tolist() == [int(wanted[2]), int(wanted[3])]


def test_every_op_with_a_reference_has_a_short_one() -> None:
    for module in WITH_REFERENCE:
        ops = {name for name, value in vars(module).items() if isinstance(value, KernelOp)}
        references = {name: value for name, value in vars(module).items() if name.endswith("_reference")}
        assert {f"{name}_reference" for name in ops} == set(references)
        for name, reference in references.items():
            assert len(inspect.getsource(reference).splitlines()) <= 40, name


def test_planning_and_rerouting_can_be_traced() -> None:
    with FakeTensorMode():
        load = torch.empty(4, 16, dtype=torch.int32, device="cuda")
        ids = torch.empty(2, 5, dtype=torch.int64, device="cuda").t()
        quota, instances, peak, bound = replica.plan_replicas(load, 2, 1, 0, 2)
        assert [tuple(t.shape) for t in (quota, instances, peak, bound)] == [(16, 4), (4, 2), (2,), (2,)]
        assert [tuple(t.shape) for t in replica.plan_fixed_rows(load, 4, 4)] == [(16, 4), (4, 4), (1,), (1,)]
        out, wrong = replica.reroute(ids, load, quota, instances, 0)
        assert (out.shape, out.dtype, out.is_contiguous(), wrong.shape) == (ids.shape, torch.int64, True, ())
        assert [t.dtype for t in (quota, instances, peak, bound)] == [torch.int32] * 2 + [torch.int64] * 2


def test_planning_by_kernels_is_no_op_of_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="moe_ep::plan_replicas"):
        replica.plan_replicas(torch.ones(2, 4, dtype=torch.int32), 1, 1, 0, 2)


def test_parts_add_up_to_the_number() -> None:
    """Exactly, whatever its size and sign, and without overflow; an infinity and a NaN are their own first part."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (64, 65), generator=generator, dtype=torch.int64).int()
    x = words.view(torch.float32)
    x = torch.where(x.isfinite() & (x.abs() > 1e-30), x, 1 + 2.0**-23)
    x[0, :3] = torch.tensor([3.4028235e38, -3.4028235e38, 0.0])
    parts = split_bfloat16(x, [0, 1, 2], True)
    assert parts.dtype == torch.bfloat16 and parts.shape == (64, 3 * 65)
    assert torch.equal(sum(part.double() for part in parts.chunk(3, 1)), x.double())
    odd = torch.tensor([[float("inf"), float("-inf"), float("nan")]])
    first, *rest = split_bfloat16(odd, [0, 1, 2], False)
    assert torch.equal(first.isnan(), odd[0].isnan()) and torch.equal(first[:2].float(), odd[0, :2])
    assert all(bool((part == 0).all()) for part in rest)


def test_copies_follow_the_pattern() -> None:
    x = torch.tensor([[1 + 2.0**-9], [-(2.0**-20)]])
    assert split_bfloat16(x, [0, 1, 0], False).flatten().tolist() == [1, -(2.0**-20), 2.0**-9, 0, 1, -(2.0**-20)]
    assert split_bfloat16(x, [1, 0], True).tolist() == [[2.0**-9, 1], [0, -(2.0**-20)]]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_logit_is_the_sum_of_its_parts(parts: int) -> None:
    logits, valid = torch.randn(7, 4 * parts), torch.tensor([True] * 5 + [False] * 2)
    logits[2, -1] = float("nan")
    masked, alive, counts = mask_logits(logits, valid, parts)
    assert alive.tolist() == [True, True, False, True, True, False, False] and counts.tolist() == [1, 5]
    want = logits.view(7, parts, 4).sum(1) * alive[:, None].where(alive[:, None], 0)
    torch.testing.assert_close(masked[alive], want[alive])
    assert bool((masked[~alive] == 0).all())


@pytest.mark.parametrize("alive", [[True] * 9, [True, False, True] * 3, [False] * 9])
def test_the_balancing_loss_of_the_op_is_the_one_of_the_package(alive: list[bool]) -> None:
    probs = torch.rand(9, 6, dtype=torch.float64).softmax(-1).requires_grad_()
    ids = torch.randint(0, 6, (9, 2)).where(torch.tensor(alive)[:, None], -1)
    load = torch.bincount(ids[ids >= 0], minlength=6)
    want = package_loss(probs, ids, torch.tensor(alive), load_E=load)
    (want_grad,) = torch.autograd.grad(want * 3, probs)
    loss, slope = balance_loss(probs.detach(), load, torch.tensor(alive), 2)
    torch.testing.assert_close(loss, want.detach())
    grad = balance_backward(slope, torch.tensor(alive), torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(grad, want_grad)
