"""Our CUDA kernels against their references: equal bits for movement and integers, and nothing touched beside them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# elements a row: one, odd, short of a warp, not in 16-byte units, whole warps of vectors, whole tiles, more than a tile
HIDDEN = (1, 7, 64, 250, 256, 1000, 1027, 4096, 7168)
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def kernels_are_there() -> None:
    """A GPU without kernels is a failure here, not a reason to skip."""
    from moe_ep.kernels import library

    assert library.missing(torch.cuda.current_device()) is None


def movement(num_source: int, num_places: int, num_rows: int, lost: float, seed: int) -> tuple[Tensor, Tensor]:
    """A random (row_index [N], positions [U, J]) of one movement: some rows have no source, some sources go nowhere."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_source * num_places, generator=generator)
    filled = min(num_rows, slots.numel())
    place = torch.randperm(num_rows, generator=generator)[:filled]
    keep = torch.rand(filled, generator=generator) >= lost
    slots, place = slots[:filled][keep], place[keep]
    row_index = torch.full((num_rows,), -1, dtype=torch.int32)
    row_index[place] = (slots // max(num_places, 1)).int()
    positions = torch.full((num_source * num_places,), -1, dtype=torch.int32)
    positions[slots] = place.int()
    return row_index, positions.view(num_source, num_places)


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)


def draw(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("num_places", (1, 2, 8, 11))
def test_gather_and_sum_have_the_reference_s_bits(dtype: torch.dtype, hidden: int, num_places: int) -> None:
    from moe_ep.kernels.rows import gather_rows, gather_rows_reference, sum_rows, sum_rows_reference

    num_source, num_rows = 37, 37 * num_places + 5
    row_index, positions = movement(num_source, num_places, num_rows, 0.2, hidden + num_places)
    x, rows = draw(num_source, hidden, dtype, 1), draw(num_rows, hidden, dtype, 2)
    used = (row_index >= 0).nonzero().view(-1)
    rows[row_index < 0] = NAN  # nobody names these rows, so nobody may read them
    rows[used[:2]] = -0.0
    same(
        gather_rows(x.cuda(), row_index.cuda(), positions.cuda(), None),
        gather_rows_reference(x, row_index, positions, None),
    )
    y = sum_rows(rows.cuda(), positions.cuda(), None)
    same(y, sum_rows_reference(rows, positions, None))
    exact = sum_rows_reference(rows.double(), positions, None)
    wide = EPSILON[torch.float64 if dtype == torch.float64 else torch.float32]
    magnitude = sum_rows_reference(rows.double().abs(), positions, None)
    bound = (
        EPSILON[dtype] * exact.abs() + 1.01 * num_places * wide * magnitude + 2.0**-24
    )  # the last: fp16's subnormals
    assert bool(((y.cpu().double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("hidden", (7, 1027, 4096))
@pytest.mark.parametrize("end", (0, 1, 50, 10_000))
def test_nothing_behind_the_bound_is_touched(hidden: int, end: int) -> None:
    from moe_ep.kernels.library import launch
    from moe_ep.kernels.rows import gather_rows_reference, sum_rows, sum_rows_reference

    row_index, positions = movement(20, 4, 64, 0.3, end)
    bound = torch.tensor([end], dtype=torch.int32)
    limit = min(end, 64)
    x = draw(20, hidden, torch.bfloat16, 3)
    out = torch.full((64, hidden), 77.0, dtype=torch.bfloat16, device="cuda")
    launch(
        "moe_ep_gather_rows",
        out,
        x.cuda(),
        out,
        row_index.cuda(),
        positions.cuda(),
        bound.cuda(),
        20,
        4,
        64,
        hidden * 2,
    )
    same(out[:limit], gather_rows_reference(x, row_index, positions, None)[:limit])
    assert bool((out[limit:] == 77).all())
    rows = draw(64, hidden, torch.bfloat16, 4)
    rows[limit:] = NAN
    y = sum_rows(rows.cuda(), positions.cuda(), bound.cuda())
    assert not y.isnan().any()
    same(y, sum_rows_reference(rows, positions, bound))


def test_addresses_between_16_byte_units_and_strided_rows() -> None:
    from moe_ep.kernels.rows import gather_rows, gather_rows_reference, sum_rows, sum_rows_reference

    row_index, positions = movement(9, 3, 27, 0.1, 5)
    flat = torch.randn(27 * 512 + 1).bfloat16()
    x = flat[1 : 9 * 512 + 1].view(9, 512)
    moved = flat.cuda()[1 : 9 * 512 + 1].view(9, 512)
    assert moved.data_ptr() % 16 != 0
    want = gather_rows_reference(x, row_index, positions, None)
    same(gather_rows(moved, row_index.cuda(), positions.cuda(), None), want)
    strided = x.cuda().t().contiguous().t()
    same(gather_rows(strided, row_index.long().cuda(), positions.long().cuda(), None), want)
    ones = torch.ones((), device="cuda").expand(27, 512)
    same(sum_rows(ones, positions.cuda(), None), sum_rows_reference(ones.cpu(), positions, None))


@pytest.mark.parametrize("shape", [(0, 4, 0), (0, 4, 6), (5, 0, 3), (5, 2, 0)])
def test_nothing_to_move(shape: tuple[int, int, int]) -> None:
    from moe_ep.kernels.rows import gather_rows, sum_rows

    num_source, num_places, num_rows = shape
    positions = torch.full((num_source, num_places), -1, dtype=torch.int32, device="cuda")
    row_index = torch.full((num_rows,), -1, dtype=torch.int32, device="cuda")
    x = torch.randn(num_source, 256, device="cuda")
    rows = torch.randn(num_rows, 256, device="cuda")
    assert gather_rows(x, row_index, positions, None).tolist() == [[0.0] * 256] * num_rows
    assert sum_rows(rows, positions, None).tolist() == [[0.0] * 256] * num_source


def test_offsets_beyond_32_bits() -> None:
    """2.4e9 elements; one source row goes to more places than a warp has lanes."""
    from moe_ep.kernels.rows import gather_rows, sum_rows

    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    hidden, num_rows = 8192, 300_000
    x = torch.randn(3, hidden, device="cuda").bfloat16()
    row_index = torch.arange(num_rows, device="cuda", dtype=torch.int32) % 3
    positions = torch.arange(num_rows, device="cuda", dtype=torch.int32).view(-1, 3).t().contiguous()
    rows = gather_rows(x, row_index, positions, None)
    for n in (0, 131_073, 262_145, num_rows - 1):
        same(rows[n], x[n % 3])
    last = torch.tensor([[num_rows - 1, num_rows - 3]], dtype=torch.int32, device="cuda")
    same(sum_rows(rows, last, None)[0], (x[2].float() + x[0].float()).bfloat16())


def ids_of(kind: str, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens + top_k)
    if kind == "one":
        return torch.full((num_tokens, top_k), num_experts - 1)
    low, high = (-3, num_experts + 2) if kind == "bad" else (-1, num_experts)
    return torch.randint(low, high, (num_tokens, top_k), generator=generator)


@pytest.mark.parametrize("kind", ("any", "bad", "one"))
@pytest.mark.parametrize("alignment", (1, 16))
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(0, 2, 4), (1, 1, 1), (33, 3, 7), (1000, 8, 64), (8192, 8, 128), (9001, 7, 513), (700, 5, 8192), (40_001, 8, 256)],
)
def test_sort_equals_the_reference(num_tokens: int, top_k: int, num_experts: int, alignment: int, kind: str) -> None:
    from moe_ep.kernels.routes import sort_routes, sort_routes_reference

    ids = ids_of(kind, num_tokens, top_k, num_experts)
    got = sort_routes(ids.cuda(), num_experts, alignment)
    for one, other in zip(got, sort_routes_reference(ids, num_experts, alignment), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other)


@pytest.mark.parametrize("alignment", (1, 8))
@pytest.mark.parametrize(
    ("num_ranks", "num_local", "most"), [(1, 4, 30), (2, 2, 3), (2, 64, 900), (8, 32, 70), (64, 128, 4), (4, 1, 50)]
)
def test_regroup_equals_the_reference(num_ranks: int, num_local: int, most: int, alignment: int) -> None:
    from moe_ep.kernels.routes import regroup_rows, regroup_rows_reference

    counts = torch.randint(0, most, (num_ranks, num_local + 3), generator=torch.Generator().manual_seed(most))
    counts[:, num_local // 2] = 0
    view = counts[:, :num_local]  # rows apart, as they come out of the exchange
    for case in (view, torch.zeros_like(view), torch.where(torch.arange(num_local) == num_local - 1, view, 0)):
        total = int(case.sum())
        wide = torch.zeros_like(counts)
        wide[:, :num_local] = case
        got = regroup_rows(wide.cuda()[:, :num_local], total, alignment)
        for one, other in zip(got, regroup_rows_reference(case, total, alignment), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other)


@pytest.mark.parametrize("met", ([], [0], [5], [0, 0], [5, 0], [5, 2], [1, 2, 3, 4]))
def test_message_equals_the_reference(met: list[int]) -> None:
    from moe_ep.kernels.routes import count_message, count_message_reference

    codes = [3, 5, 6, 8][: len(met)]
    for num_ranks, num_experts in ((1, 3), (2, 64), (8, 256), (64, 512)):
        counts = torch.randint(0, 1 << 40, (num_experts,))
        want = count_message_reference(counts, [torch.tensor(n) for n in met], codes, 1, 1 << 33, num_ranks)
        got = count_message(counts.cuda(), [torch.tensor(n).cuda() for n in met], codes, 1, 1 << 33, num_ranks)
        assert got.shape == want.shape and torch.equal(got[0].cpu(), want[0])


def test_too_many_experts_are_refused_and_the_device_still_works() -> None:
    from moe_ep.kernels.build import KernelError
    from moe_ep.kernels.routes import sort_routes

    with pytest.raises(KernelError, match="invalid argument"):
        sort_routes(torch.zeros(4, 2, dtype=torch.int64, device="cuda"), 8193, 1)
    assert sort_routes(torch.zeros(4, 2, dtype=torch.int64, device="cuda"), 8192, 1)[3].sum().item() == 8


def test_a_graph_replays_with_other_routes() -> None:
    from moe_ep.kernels.routes import sort_routes
    from moe_ep.kernels.rows import gather_rows, sum_rows

    ids = ids_of("any", 64, 4, 8).cuda()
    x = torch.randn(64, 512, device="cuda").bfloat16()

    def layer() -> Tensor:
        row_token, _, positions, _, offsets, _ = sort_routes(ids, 8, 1)
        return sum_rows(gather_rows(x, row_token, positions, offsets[-1:]), positions, offsets[-1:])

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    ids.copy_(ids_of("any", 64, 4, 8).flip(0))
    x.normal_()
    graph.replay()
    same(captured, layer())
    same(captured, ((ids >= 0).sum(1, keepdim=True) * x.float()).bfloat16())


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_dispatcher_gives_the_same_bits_with_kernels_and_with_torch(dtype: str) -> None:
    from moe_ep.config import DispatchConfig
    from moe_ep.dispatch import build_dispatcher
    from moe_ep.routing import Routing

    results = []
    ids = ids_of("any", 300, 4, 16).cuda()
    for kernels in ("cuda", "torch"):
        generator = torch.Generator("cuda").manual_seed(6)
        x = torch.randn(300, 200, device="cuda", generator=generator).to(getattr(torch, dtype)).requires_grad_()
        weights = torch.rand(300, 4, device="cuda", generator=generator).requires_grad_()
        dy = torch.randn(300, 200, device="cuda", generator=generator).to(x.dtype)
        for name in ("all2all", "local", "agrs"):
            config = DispatchConfig(
                name=name, num_experts=16, top_k=4, hidden_size=200, dtype=dtype, max_tokens=300, kernels=kernels
            )
            dispatcher = build_dispatcher(config)
            ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=ids, weights=weights, num_experts=16))
            dispatcher.dispatch(ticket)
            inp = dispatcher.dispatch_postprocess(ticket)
            assert inp.kernels == (kernels == "cuda")
            dispatcher.combine_preprocess(ticket, (inp.rows() * inp.row_weights[:, None]).to(x.dtype))
            dispatcher.combine(ticket)
            y = dispatcher.combine_postprocess(ticket)
            y.backward(dy)
            assert x.grad is not None and weights.grad is not None
            results.append((kernels, name, y.detach(), x.grad, weights.grad))
            x.grad = weights.grad = None
    half = len(results) // 2
    for ours, torchs in zip(results[:half], results[half:], strict=True):
        assert ours[1] == torchs[1]
        for one, other in zip(ours[2:], torchs[2:], strict=True):
            assert math.isfinite(float(one.sum()))
            same(one, other)


def test_ops_obey_their_schemas_and_fakes() -> None:
    from moe_ep.kernels.routes import regroup_rows, sort_routes
    from moe_ep.kernels.rows import gather_rows, sum_rows

    row_index, positions = (t.cuda() for t in movement(5, 2, 12, 0.2, 7))
    bound = torch.tensor([7], dtype=torch.int32, device="cuda")
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        gather_rows.op, (torch.randn(5, 64, device="cuda"), row_index, positions, None), test_utils=tests
    )
    torch.library.opcheck(sum_rows.op, (torch.randn(12, 64, device="cuda"), positions, bound), test_utils=tests)
    torch.library.opcheck(sort_routes.op, (ids_of("bad", 9, 3, 5).cuda(), 5, 4), test_utils=tests)
    torch.library.opcheck(regroup_rows.op, (torch.tensor([[1, 2], [0, 4]], device="cuda"), 7, 2), test_utils=tests)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("inner", (1, 9, 64, 768, 1000, 2048))
@pytest.mark.parametrize("end", (None, 0, 13))
def test_swiglu_is_as_near_to_float64_as_one_rounding_allows(dtype: torch.dtype, inner: int, end: int | None) -> None:
    from moe_ep.kernels import swiglu as ops

    num_rows = 21
    limit = num_rows if end is None else end
    generator = torch.Generator().manual_seed(inner)
    h = (4 * torch.randn(num_rows, 2 * inner, generator=generator)).to(dtype)
    q = torch.randn(num_rows, inner, generator=generator).to(dtype)
    weights = torch.rand(num_rows, generator=generator)
    for tensor in (h, q, weights):
        tensor[limit:] = NAN
    bound = None if end is None else torch.tensor([end], dtype=torch.int32)
    on_gpu = [None if t is None else t.cuda() for t in (q, h, weights, bound)]
    got = ops.swiglu_backward(*on_gpu, True, True)
    want = ops.swiglu_backward_reference(q.double(), h.double(), weights.double(), bound, True, True)
    # the function is computed in float32 (narrow types: with an exponential that is good to 2 + |x| units in the last
    # place), each term with an error of its own size, and rounded once
    wide = 2.0**-20 if dtype == torch.float32 else 2.0**-17
    gate, up = h.double().abs().chunk(2, dim=-1)
    values = (1 + gate) * (1 + up)
    terms = q.double().abs() * values  # weights are at most 1
    sizes = (torch.cat([terms, terms], 1), values, terms.sum(-1))
    for number, (one, exact, size) in enumerate(zip(got, want, sizes, strict=True)):
        error, rounding = (one.cpu().double() - exact)[:limit].abs(), EPSILON[torch.float32 if number == 2 else dtype]
        allowed = rounding * exact[:limit].abs() + wide * size[:limit] + 2.0**-24
        assert bool((error <= allowed).all()), f"output {number}: {float((error - allowed).max())}"
    for scaled in (None, weights):
        act = ops.swiglu(on_gpu[1], None if scaled is None else scaled.cuda(), on_gpu[3])
        exact = ops.swiglu_reference(h.double(), None if scaled is None else scaled.double(), bound)[:limit]
        error = (act.cpu().double()[:limit] - exact).abs()
        assert bool((error <= EPSILON[dtype] * exact.abs() + wide * values[:limit] + 2.0**-24).all())
    again = ops.swiglu_backward(*on_gpu, True, True)
    for one, other in zip(got, again, strict=True):
        same(one[:limit], other[:limit])


@pytest.mark.parametrize("hidden", (1, 1000, 1027))
@pytest.mark.parametrize("end", (0, 5, 12, 99))
def test_scaling_and_zeroing_stop_at_the_bound(hidden: int, end: int) -> None:
    from moe_ep.kernels import swiglu as ops

    rows, weights = draw(12, hidden, torch.bfloat16, 8), torch.rand(12)
    bound = torch.tensor([end], dtype=torch.int32)
    scaled, cut = rows.cuda(), rows.cuda()
    ops.scale_rows(scaled, weights.cuda(), bound.cuda())
    ops.zero_tail(cut, bound.cuda())
    want = rows.clone()
    ops.scale_rows_reference(want, weights, bound)
    same(scaled, want)
    want = rows.clone()
    ops.zero_tail_reference(want, bound)
    same(cut, want)


@pytest.mark.parametrize("weighting", ("output", "activation"))
@pytest.mark.parametrize("known", (True, False))
def test_experts_with_kernels_agree_with_torch_and_leave_no_nan(weighting: str, known: bool) -> None:
    from moe_ep.expert_input import ExpertInput
    from moe_ep.grouped_mlp import grouped_swiglu
    from moe_ep.sorted_routes import make_offsets

    counts, tail, hidden, inner = (30, 0, 5, 17), 0 if known else 12, 256, 136
    total = sum(counts)
    generator = torch.Generator("cuda").manual_seed(9)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    tokens = torch.tensor(counts, device="cuda")
    source, weights = randn(total + tail, hidden).bfloat16(), torch.rand(total + tail, device="cuda")
    parameters = [(0.1 * randn(4, 2 * inner, hidden)).bfloat16(), (0.1 * randn(4, hidden, inner)).bfloat16()]
    dy = randn(total + tail, hidden).bfloat16()
    for tensor in (source, weights, dy):
        tensor[total:] = NAN
    found = []
    for kernels in (True, False):
        leaves = [t.clone().requires_grad_() for t in (source, weights, *parameters)]
        inp = ExpertInput(
            source=leaves[0], row_weights=leaves[1], offsets=make_offsets(tokens), tokens_per_expert=tokens.int(),
            capacity=total + tail, host_counts=counts if known else None, kernels=kernels,
        )  # fmt: skip
        y = grouped_swiglu(inp, leaves[2], leaves[3], weight_activation=weighting == "activation")
        y.backward(dy)
        grads = [t.grad for t in leaves]
        assert grads[0] is not None and grads[1] is not None
        assert grads[0][total:].count_nonzero() == 0 and grads[1][total:].count_nonzero() == 0
        found.append([y[:total], *grads])
    for ours, torchs in zip(*found, strict=True):
        assert ours is not None and torchs is not None and ours.isfinite().all()
        error = (ours.float() - torchs.float()).norm() / torchs.float().norm()
        assert float(error) < 2.0**-7  # both round to bfloat16, torch once more on the way
