"""What people reported about other software of this kind, tried on layers over ranks. See docs/field_reports.md."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_ep import InputError, MoEConfig, MoELayer, PeerError
from moe_ep.consistency import check_copies
from moe_ep.dispatch.row_transfers import AllToAllRows
from moe_ep.dispatch.transfer import Flight, finish, pack, start
from moe_ep.gradients import global_norm
from moe_ep.recompute import recompute_context_fn
from moe_ep.streams import comm_stream
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


def own_part(layer: MoELayer, name: str, whole: Tensor) -> Tensor:
    """This rank's experts of a tensor over all experts; anything else as it is."""
    first, count = layer.experts.first_expert, layer.dispatcher.num_local
    return whole[first : first + count] if "experts." in name else whole


# ---- DistributedDataParallel ----


class Net(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None, dispatcher: str) -> None:
        super().__init__()
        self.moe = make(group, dispatcher=dispatcher, num_experts=4, top_k=1, normalize_weights=False)
        self.out = nn.Linear(H, H, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.eye(H))
            self.moe.router.weight.zero_()[:, :4] = torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        y, aux = self.moe(x)
        return self.out(y).square().sum() + aux.loss


def steered(rank: int, step: int) -> Tensor:
    """Rank 0 visits experts 0 to 3, rank 1 only 1 and 3."""
    x = rows(6, rank, step)
    x[:, :4] = 0
    chosen = torch.arange(6) % 4 if rank == 0 else 1 + 2 * (torch.arange(6) % 2)
    x[torch.arange(6), chosen] = 3.0
    return x


def ddp_steps(group: dist.ProcessGroup, rank: int, dispatcher: str, spread: bool) -> None:
    net, alone = Net(group if spread else None, dispatcher), Net(None, dispatcher)
    if spread:  # each rank has its own experts: neither to be broadcast nor to be averaged
        own = [f"moe.experts.{name}" for name, _ in net.moe.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, own)
    ddp = DistributedDataParallel(net, process_group=group, find_unused_parameters=False)
    for step in (0, 2):
        with ddp.no_sync():
            ddp(steered(rank, step)).backward()
        ddp(steered(rank, step + 1)).backward()
    for peer in range(2):
        for step in range(4):
            alone(steered(peer, step)).backward()
    if rank == 1:
        assert net.moe.router.load_E.tolist() == [0, 12, 0, 12]
    for (name, parameter), reference in zip(net.named_parameters(), alone.parameters(), strict=True):
        summed = parameter.grad * (1 if spread and "experts." in name else 2)  # the wrapper averages over 2 ranks
        assert_near(summed, own_part(net.moe, name, reference.grad))


@pytest.mark.parametrize("spread", [False, True], ids=["replicated experts", "spread experts"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_data_parallel_with_an_expert_unused_on_one_rank_only(pool: RankPool, dispatcher: str, spread: bool) -> None:
    """jingyaogong/minimind#835: DDP must not wait for it; NVIDIA/Megatron-LM#7186: all four micro-batches count."""
    pool.run(ddp_steps, dispatcher, spread, num_ranks=2, timeout_s=30)


# ---- copies on several ranks ----


def sgd_steps(group: dist.ProcessGroup, rank: int, dispatcher: str, weighting: str, reduce: bool) -> str:
    layer = make(group, dispatcher=dispatcher, weighting=weighting, aux_loss_coef=0.01, z_loss_coef=0.01)
    for step in range(3):
        y, aux = layer(rows(5, rank, step))
        (y.square().sum() + aux.loss).backward()
        if reduce:
            dist.all_reduce(layer.router.weight.grad, group=group)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        try:
            check_copies(((f"router.{n}", p) for n, p in layer.router.named_parameters()), group)
        except PeerError as err:
            return f"step {step}: {err}"
    return ""


@pytest.mark.parametrize("weighting", ["output", "activation"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_routers_stay_equal_bit_for_bit_or_are_named(pool: RankPool, dispatcher: str, weighting: str) -> None:
    """pytorch/torchtitan#2387, pytorch/torchtitan#2416, pytorch/torchtitan#4054: the same sum on every rank, and a
    check that finds the copy that somebody forgot to reduce."""
    assert pool.run(sgd_steps, dispatcher, weighting, True, num_ranks=2) == ["", ""]
    said = pool.run(sgd_steps, dispatcher, weighting, False, num_ranks=2)
    assert said[0] == said[1] and said[0].startswith("step 0: copies differ from rank 0's: router.weight on rank 1.")


def drifted(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Experts differ by design; then the router's weight of rank 1 is changed, and after it the bias as well."""
    layer = make(group, router="sigmoid", bias_update_rate=0.01)
    said = []
    for tensor in (None, layer.router.weight, layer.router.bias):
        if tensor is not None and rank == 1:
            with torch.no_grad():
                tensor[0] += 1
        for what in (
            layer,
            layer.router.state_dict(prefix="router."),
            layer.router.state_dict(prefix="router.").items(),
        ):
            try:
                check_copies(what, group)
            except PeerError as err:
                said.append(str(err).partition(". A gradient")[0])
    with pytest.raises(InputError, match=r"takes a model, a dict of tensors, or \(name, tensor\) pairs; got a str"):
        check_copies(["router.weight"], group)  # type: ignore[list-item]
    return said


def test_copies_of_a_model_a_dict_or_pairs_are_compared(pool: RankPool) -> None:
    weight = "copies differ from rank 0's: router.weight on rank 1"
    both = f"{weight}; router.bias on rank 1"
    assert pool.run(drifted, num_ranks=2) == [[weight] * 3 + [both] * 3] * 2


def norms(group: dist.ProcessGroup, rank: int) -> tuple[float, float]:
    own = [[torch.full((5,), 2.0)], [torch.tensor([6.0, 8.0])]][rank]
    everybody = global_norm(own, 2.0, group, CPU).item()
    shared = [torch.full((4,), 3.0)] if rank == 0 else []  # a copy is counted by one rank
    return everybody, global_norm([*shared, torch.full((2,), 4.0)], 2.0, group, CPU).item()


def test_the_norm_is_of_all_gradients_not_the_mean_of_norms(pool: RankPool) -> None:
    """hpcaitech/ColossalAI#2192: sqrt(20) and sqrt(100) make sqrt(120); deepspeedai/DeepSpeed#8478,
    deepspeedai/DeepSpeed#8613: and 4 shared threes with 4 expert fours make 10."""
    assert pool.run(norms, num_ranks=2) == [pytest.approx((120**0.5, 10.0))] * 2


# ---- recompute ----


class Shaken(nn.Module):
    """A layer whose router sees other logits in every pass, with near ties and exact ties among them."""

    def __init__(self, layer: MoELayer, noise: float) -> None:
        super().__init__()
        self.layer, self.noise, self.passes = layer, noise, 0
        with torch.no_grad():
            layer.router.weight[1:] = layer.router.weight[0] * (1 + 1e-7 * (torch.arange(1, 8) // 2)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        shake = self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(self.passes))
        y, aux = self.layer(x + shake)
        return y + aux.loss


def recomputed(group: dist.ProcessGroup, rank: int, dispatcher: str, counts: list[int], noise: float) -> list[int]:
    block, plain = (Shaken(make(group, dispatcher=dispatcher, aux_loss_coef=0.1), noise) for _ in range(2))
    x, other = rows(counts[rank], rank).requires_grad_(), rows(counts[rank], rank).requires_grad_()
    y = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in block.parameters())
    if noise == 0:
        plain(other).square().sum().backward()
        for got, want in zip([x, *block.parameters()], [other, *plain.parameters()], strict=True):
            assert torch.equal(got.grad, want.grad)
    return [block.passes, int(block.layer.router.load_E.sum())]


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("counts", [[16, 9], [0, 6], [0, 0]], ids=["full", "one empty", "both empty"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_recompute_of_a_layer_whose_router_decides_anew(
    pool: RankPool, dispatcher: str, counts: list[int], noise: float
) -> None:
    """NVIDIA-NeMo/Automodel#2635, NVIDIA-NeMo/Automodel#3156, ByteDance-Seed/VeOmni#979, NVIDIA-NeMo/RL#1203: the
    second pass goes where the first went; NVIDIA-NeMo/Automodel#3680: also on a rank without tokens."""
    for early_stop in (True, False):
        with set_checkpoint_early_stop(early_stop):
            found = pool.run(recomputed, dispatcher, counts, noise, num_ranks=2, timeout_s=20)
        assert found == [[2, 2 * count] for count in counts]


# ---- lengths, padding, groups, collectives of gloo ----


def lengths(group: dist.ProcessGroup, rank: int, dispatcher: str, steps: list[list[int]]) -> None:
    layer, alone = make(group, dispatcher=dispatcher), make(None)
    for number, counts in enumerate(steps):
        x, other = (rows(counts[rank], rank, number).requires_grad_() for _ in range(2))
        y, want = layer(x)[0], alone(other)[0]
        (y.square().sum() + want.square().sum()).backward()
        assert_near(y, want)
        assert_near(x.grad, other.grad)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_lengths_that_differ_over_steps_and_ranks(pool: RankPool, dispatcher: str) -> None:
    """PrimeIntellect-ai/prime-rl#3411, deepseek-ai/DeepEP#604, NVIDIA/Megatron-Energon#183: no number of collectives
    and no size of a buffer follows from one rank's length; sgl-project/sglang#25397, sgl-project/sgl-kernel-npu#738:
    nor from a length of 0."""
    steps = [[64, 64], [64, 96], [128, 32], [100, 20], [0, 8], [0, 0], [1, 0]]
    pool.run(lengths, dispatcher, steps, num_ranks=2, timeout_s=20)


def no_sequences(group: dist.ProcessGroup, rank: int, dispatcher: str, level: str) -> None:
    changes = dict(dispatcher=dispatcher, aux_loss=level, aux_loss_coef=0.1)
    layer = make(group, **changes)
    copied, alone = copy.deepcopy(layer), make(None, **changes)  # a copy of the weights that shares the dispatcher
    x, other = (rows(12 * rank, 3).view(2 * rank, 6, H).requires_grad_() for _ in range(2))
    (y, aux), (want, want_aux) = copied(x, torch.ones(x.shape[:2], dtype=torch.bool)), alone(other)
    (y.square().sum() + aux.loss).backward()
    (want.square().sum() + want_aux.loss).backward()
    assert_near(y, want)
    assert_near(x.grad, other.grad)
    assert copied.router.weight.grad is not None and layer.router.weight.grad is None


@pytest.mark.parametrize("level", ["batch", "sequence"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_batch_without_sequences(pool: RankPool, dispatcher: str, level: str) -> None:
    """sgl-project/sglang#25397: x is [0, T, H] on one rank and [2, T, H] on the other."""
    pool.run(no_sequences, dispatcher, level, num_ranks=2, timeout_s=20)


def split_in_two(group: dist.ProcessGroup, rank: int, dispatcher: str, count: int) -> None:
    """Two micro-batches interleaved through the layer's parts, against one call; halves are uneven or empty."""
    layer, whole = (make(group, dispatcher=dispatcher, num_shared_experts=1, shared_intermediate_size=4) for _ in "ab")
    x, other = (rows(count, rank).requires_grad_() for _ in range(2))
    parts = x.tensor_split(2)
    flights = [layer.launch_dispatch(part, micro_batch=number) for number, part in enumerate(parts)]
    for flight in flights:
        layer.launch_combine(flight)
    ys = [layer.resolve(f) + layer.run_shared(part) for f, part in zip(flights, parts, strict=True)]
    torch.cat(ys).square().sum().backward()
    y = whole(other)[0]
    y.square().sum().backward()
    assert_near(torch.cat(ys), y)
    for got, want in zip([x, *layer.parameters()], [other, *whole.parameters()], strict=True):
        assert_near(got.grad, want.grad)


@pytest.mark.parametrize("count", [7, 1, 0])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_tokens_that_two_interleaved_micro_batches_do_not_divide(pool: RankPool, dispatcher: str, count: int) -> None:
    """pytorch/torchtitan#3193: T = 7, 1 and 0 in two parts."""
    pool.run(split_in_two, dispatcher, count, num_ranks=2, timeout_s=20)


def padded(group: dist.ProcessGroup, rank: int, dispatcher: str) -> int:
    layer, alone = make(group, dispatcher=dispatcher, aux_loss_coef=0.1), make(None, aux_loss_coef=0.1)
    valid = torch.arange(64) % 4 != rank % 4  # 48 of 64
    x = rows(64, rank).masked_fill(~valid[:, None], float("nan")).requires_grad_()
    y, aux = layer(x, valid)
    (y.square().sum() + aux.loss).backward()
    dense = rows(64, rank)[valid].requires_grad_()
    want, want_aux = alone(dense)
    (want.square().sum() + want_aux.loss).backward()
    assert not y[~valid].any() and not x.grad[~valid].any()
    assert_near(y[valid], want)
    assert_near(x.grad[valid], dense.grad)
    assert torch.equal(aux.load, want_aux.load) and aux.num_tokens == 48
    return int(aux.rank_load.sum())


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_padding_moves_no_row_and_gets_no_gradient(pool: RankPool, dispatcher: str) -> None:
    """NVIDIA/Megatron-LM#5542: tokens without any route, in dispatchers that move T*K rows elsewhere."""
    assert pool.run(padded, dispatcher, timeout_s=20) == [48 * 2] * 4


def grouped(group: dist.ProcessGroup, rank: int, groups: int, router: str) -> str:
    changes = dict(top_k=4, num_groups=groups, router=router)
    layer, other = (make(group, dispatcher=name, **changes) for name in ("agrs", "all2all"))
    x = rows(9 + rank, rank)
    assert_near(layer(x)[0], other(x)[0])
    return layer.dispatcher.describe()


@pytest.mark.parametrize(("groups", "router"), [(0, "softmax"), (0, "sigmoid"), (2, "grouped"), (4, "grouped")])
def test_gathering_dispatcher_under_every_router(pool: RankPool, groups: int, router: str) -> None:
    """InternLM/xtuner#1245: it needs no grouped router; where the groups are the ranks it uses them, and says so."""
    form = "grouped form" if groups == 4 else "general form"
    assert all(form in text for text in pool.run(grouped, groups, router, timeout_s=20))


def uneven_splits(group: dist.ProcessGroup, rank: int, table: list[list[int]]) -> list[float]:
    """table[r] is what rank r sends to each rank, values 100 * sender + row; forward and backward, all in flight."""
    send, recv = table[rank], [row[rank] for row in table]
    x = (100.0 * rank + torch.arange(sum(send)))[:, None].repeat(1, 2).requires_grad_()
    packed, payload = pack(x)
    flight = Flight(AllToAllRows(group, send, recv, sum(send), sum(recv)), comm_stream(CPU, group), "probe", packed)
    (got,) = finish(flight, *start(flight, *payload))
    (got * (rank + 1)).sum().backward()
    receiver = torch.repeat_interleave(torch.arange(len(send)), torch.tensor(send))
    assert torch.equal(x.grad, (receiver + 1.0)[:, None].expand(-1, 2))
    return got[:, 0].tolist()


SPLITS = {
    "one-sided": [[0, 3], [5, 0]],
    "nothing": [[0, 0], [0, 0]],
    "one sender": [[0, 0], [2, 1]],
    "three ranks": [[0, 3, 0], [5, 0, 1], [0, 0, 2]],
    "three ranks, nothing": [[0, 0, 0]] * 3,
}


@pytest.mark.parametrize("case", SPLITS)
def test_uneven_and_empty_splits_on_gloo(pool: RankPool, case: str) -> None:
    """pytorch/pytorch#88245, pytorch/pytorch#43256: the single-tensor form, asynchronous, with zero-size splits."""
    table = SPLITS[case]
    expected = []
    for receiver in range(len(table)):
        starts = [sum(row[:receiver]) for row in table]
        expected.append([100.0 * s + starts[s] + i for s, row in enumerate(table) for i in range(row[receiver])])
    assert pool.run(uneven_splits, table, num_ranks=len(table), timeout_s=20) == expected
