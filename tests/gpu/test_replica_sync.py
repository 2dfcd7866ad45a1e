"""Weights to replicas and gradients home by kernels: one GPU that stands in for R, and two GPUs over peer memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.errors import InputError, PeerError, Unavailable
from moe_ep.faults import FaultRecord
from moe_ep.replica import plan
from moe_ep.replica.lanes import SlotLane
from moe_ep.replica.messages import GroupTransport
from moe_ep.replica.peer_transport import PeerTransport
from moe_ep.replica.transport import SlotBuffers
from moe_ep.replica.with_replicas import WithReplicas
from moe_ep.testing.ranks import RankPool
from tests.unit.test_replica_sync_source import draw_instances, expected

pytestmark = pytest.mark.gpu(1)
LOST = 10
LATE_CYCLES = 4_000_000  # some 2 ms


class Ranks:
    """R ends on one GPU: a stream and a block of memory for each."""

    def __init__(
        self, num_ranks: int, num_local: int, slots: int, parts: tuple[int, ...], timeout_s: float = 20
    ) -> None:
        from moe_ep.kernels.replica_sync import SlotPeers, SlotShape

        device = torch.device("cuda", torch.cuda.current_device())
        self.shape = SlotShape(
            num_ranks=num_ranks, num_local=num_local, slots=slots, parts=tuple((n, 2) for n in parts)
        )
        _, _, self.weights_at, self.grads_at, size = self.shape.layout()
        self.memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
        self.faults = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(num_ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        addresses = [block.data_ptr() for block in self.memory]
        self.peers = [
            SlotPeers(
                self.shape, r, addresses, device, code_lost=LOST, fault=self.faults[r], timeout_s=timeout_s, blocks=3
            )
            for r in range(num_ranks)
        ]
        torch.cuda.synchronize()

    def slots(self, rank: int, part: int, *, grads: bool) -> Tensor:
        n, dtype = self.shape.parts[part][0], torch.float32 if grads else torch.bfloat16
        at = (self.grads_at if grads else self.weights_at)[part]
        return self.memory[rank][at : at + self.shape.slots * n * dtype.itemsize].view(dtype).view(-1, n)

    def run(
        self, instances: Tensor, home: list[list[Tensor]], held: list[list[Tensor]], *, pull: bool, late: int
    ) -> list[list[Tensor]]:
        """Fill every rank's slots on its stream, run the operation behind that, copy the slots behind that."""
        for r, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                if r == late:
                    torch.cuda._sleep(LATE_CYCLES)
                for part, values in enumerate(held[r]):
                    self.slots(r, part, grads=pull).copy_(values)
                (self.peers[r].pull if pull else self.peers[r].push)(instances, home[r])
        after = []  # issued behind all operations: streams may share a queue, where a copy would hold others up
        for r, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                after.append([self.slots(r, part, grads=pull).clone() for part in range(len(held[r]))])
        torch.cuda.synchronize()
        return after


@pytest.mark.parametrize(
    ("num_ranks", "num_local", "slots", "parts"),
    [(1, 2, 1, (8,)), (2, 1, 1, (8, 16400)), (3, 2, 2, (1032,)), (4, 3, 3, (16, 8, 70000)), (8, 4, 2, (4104, 2048))],
)
def test_slots_are_filled_and_gradients_added(
    num_ranks: int, num_local: int, slots: int, parts: tuple[int, ...]
) -> None:
    """Six rounds; each rank is late once or more, and others use their slots right in front and right behind."""
    ranks = Ranks(num_ranks, num_local, slots + 1, parts)
    for turn, pull in itertools.product(range(6), (False, True)):
        gen = torch.Generator().manual_seed(2 * turn + pull)
        dtype = torch.float32 if pull else torch.bfloat16
        instances = draw_instances(num_ranks, num_local, slots, 2 * turn + pull)
        home, held = (
            [[torch.randn(rows, n, generator=gen).to(dtype) for n in parts] for _ in range(num_ranks)]
            for rows in (num_local, slots + 1)
        )
        on_gpu = [[[t.cuda() for t in own] for own in side] for side in (home, held)]
        wanted = expected(instances, home, held, num_local, pull)  # changes held, too
        late = (turn + pull) % num_ranks
        after = ranks.run(instances.cuda(), *on_gpu, pull=pull, late=late)
        for rank, part in itertools.product(range(num_ranks), range(len(parts))):
            assert torch.equal(on_gpu[0][rank][part].cpu(), wanted[rank][part])
            assert torch.equal(after[rank][part].cpu(), held[rank][part])
    assert [int(fault) for fault in ranks.faults] == [0] * num_ranks


def test_a_graph_is_replayed_with_other_plans() -> None:
    """The epoch is on the device: a captured push and pull serve every plan that lies in the same tensor."""
    ranks = Ranks(2, 2, 2, (4096,))
    instances = torch.full((2, 2), -1, dtype=torch.int32, device="cuda")
    masters = [torch.randn(2, 4096, device="cuda").bfloat16() for _ in range(2)]
    totals = [torch.zeros(2, 4096, device="cuda") for _ in range(2)]
    graphs = []
    for r, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            ranks.peers[r].push(instances, [masters[r]])
            ranks.slots(r, 0, grads=True).copy_(ranks.slots(r, 0, grads=False))
            ranks.peers[r].pull(instances, [totals[r]])
        graphs.append(graph)
    for filled in ([[2, 3], [0, -1]], [[3, -1], [0, 1]], [[-1, -1], [1, -1]]):
        instances.copy_(torch.tensor(filled))
        for total in totals:
            total.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        used = {expert for own in filled for expert in own}
        for r, local in itertools.product(range(2), range(2)):
            want = masters[r][local].float() if 2 * r + local in used else torch.zeros(4096, device="cuda")
            assert torch.equal(totals[r][local], want)
    assert [int(fault) for fault in ranks.faults] == [0, 0]


@pytest.mark.parametrize("pull", [False, True])
def test_a_rank_that_never_comes_is_a_fault_in_time(pull: bool) -> None:
    ranks = Ranks(2, 1, 1, (4096,), timeout_s=0.2)
    for rank in range(2):
        ranks.slots(rank, 0, grads=pull).fill_(3)
    own = torch.ones(1, 4096, device="cuda", dtype=torch.float32 if pull else torch.bfloat16)
    (ranks.peers[0].pull if pull else ranks.peers[0].push)(torch.tensor([[1], [0]], device="cuda").int(), [own])
    torch.cuda.synchronize()
    assert (int(ranks.faults[0]) >> 56, int(ranks.faults[0]) & 0xFFFFFFFF) == (LOST, 1)
    assert bool((own == 1).all())
    assert all(bool((ranks.slots(rank, 0, grads=pull) == 3).all()) for rank in range(2))


def test_offsets_beyond_32_bits() -> None:
    """The last slot begins 2.4e9 bytes into its tensor."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    size = 600_000_000
    ranks = Ranks(2, 1, 3, (size,))
    masters = [torch.zeros(1, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    masters[0].view(-1)[-8:] = 7
    instances = torch.tensor([[-1, -1, -1], [-1, -1, 0]], dtype=torch.int32, device="cuda")
    for peers, stream, master in zip(ranks.peers, ranks.streams, masters, strict=True):
        with torch.cuda.stream(stream):
            peers.push(instances, [master])
    torch.cuda.synchronize()
    assert torch.equal(ranks.slots(1, 0, grads=False)[2], masters[0][0])
    assert not ranks.slots(1, 0, grads=False)[:2].any() and not ranks.slots(0, 0, grads=False).any()


def test_tensors_that_do_not_fit_are_refused() -> None:
    from moe_ep.kernels.build import KernelError

    ranks = Ranks(1, 2, 1, (64,))
    instances = torch.full((1, 1), -1, dtype=torch.int32, device="cuda")
    for wrong in (
        torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16),
        torch.zeros(64, 2, device="cuda", dtype=torch.bfloat16).t(),
        torch.zeros(129, device="cuda", dtype=torch.bfloat16)[1:],
    ):
        with pytest.raises(KernelError, match="moe_ep_replica_push takes 256 bytes in a row"):
            ranks.peers[0].push(instances, [wrong])


def body_rounds(group: dist.ProcessGroup, rank: int) -> list[str]:
    """Pushes and pulls of many plans, without a host sync in between; what differs from messages in plain torch."""
    like = [torch.zeros(2, 48, 64, device="cuda", dtype=torch.bfloat16), torch.zeros(2, 64, 8, device="cuda")]
    record = FaultRecord(like[0].device, 4)
    transport = PeerTransport(group, 3, like, record)
    wrong, rounds = [], []
    gen = torch.Generator().manual_seed(5)
    for turn in range(8):
        load = torch.randint(0, 100, (2, 4), generator=gen)
        load[:, turn % 4] += 400
        made = plan(load.int(), 2)
        home = [[torch.randn(t.shape, generator=gen).to(t.dtype) for t in like] for _ in range(2)]
        total = [[torch.randn(t.shape, generator=gen) for t in like] for _ in range(2)]
        held = [[torch.randn(3, *t.shape[1:], generator=gen) for t in like] for _ in range(2)]
        rounds.append((made, home, total, held))
    on_gpu = [
        (plan(made.load.cuda(), 2), *([t.cuda() for t in side[rank]] for side in sides)) for made, *sides in rounds
    ]
    torch.cuda.synchronize()
    found: list[Any] = []
    for turn, (made, home, total, held) in enumerate(on_gpu):
        if turn % 2 == rank:
            torch.cuda._sleep(LATE_CYCLES)
        for slots, values in zip((*transport.buffers.weights, *transport.buffers.grads), (*held, *held), strict=True):
            slots.copy_(values)
        transport.weight_sync(made, home, transport.buffers.weights).wait()
        weights = [t.clone() for t in transport.buffers.weights]
        transport.grad_reduce(made, transport.buffers.grads, total).wait()
        found.append((weights, [t.clone() for t in transport.buffers.grads]))
    torch.cuda.synchronize()
    for turn, ((made, home, total, held), (weights, grads)) in enumerate(zip(rounds, found, strict=True)):
        slots = [[t.to(master.dtype, copy=True) for t, master in zip(own, like, strict=True)] for own in held]
        expected(made.instances, home, slots, 2, pull=False)
        expected(made.instances, total, held, 2, pull=True)
        pairs = {
            "weights": (weights, slots[rank]),
            "grads": (grads, held[rank]),
            "totals": (on_gpu[turn][2], total[rank]),
        }
        wrong += [
            f"{name} of round {turn}"
            for name, (got, want) in pairs.items()
            if not all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        ]
    wrong += [] if sum(int(made.num_replicas()) for made, *_ in rounds) >= 8 else ["too few replicas to show anything"]
    record.raise_if_set(group)
    transport.close()
    return wrong


def body_training(group: dist.ProcessGroup, rank: int, num_local: int, slots: int) -> tuple[list[bool], int, int]:
    """Whether each gradient has the bits that NCCL's messages give it; numbers of replicas, of gradients not 0."""
    gen = torch.Generator().manual_seed(rank)
    layers = [
        [torch.randn(num_local, 64, 64, generator=gen).cuda().requires_grad_() for _ in range(2)] for _ in range(3)
    ]
    x = torch.randn(16, 64, generator=gen).cuda()
    loads = [
        torch.ones(2, 2 * num_local).long().index_fill(1, torch.tensor([i + 1]), 90).int().cuda() for i in range(3)
    ]
    plans = [plan(load, slots) for load in loads]
    record = FaultRecord(x.device, 2 * num_local)
    peers, messages = PeerTransport(group, slots, layers[0], record), GroupTransport(group)

    def gradients(transport: GroupTransport, buffers: SlotBuffers) -> list[Tensor]:
        total, lane = x.new_zeros(()), SlotLane(transport, buffers)
        for parts, made in zip(layers, plans, strict=True):
            replicas = WithReplicas(parts)
            replicas.sync(made, lane)
            masters, copies = replicas.take()
            used = (made.instances[rank] >= 0).tolist()
            rows = [x @ masters[0][i] * masters[1][i].sum() for i in range(num_local)]
            rows += [x @ copies[0][i] * copies[1][i].sum() for i in range(slots) if used[i]]
            total = total + replicas.again(torch.stack(rows)).square().mean()
        leaves = [leaf for parts in layers for leaf in parts]
        return list(torch.autograd.grad(total, leaves))

    found = [gradients(peers, peers.buffers), gradients(messages, SlotBuffers(slots, layers[0]))]
    again = gradients(peers, peers.buffers)
    same = [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, again, strict=True)]
    record.raise_if_set(group)
    peers.close()
    return same, sum(int(made.num_replicas()) for made in plans), sum(bool(grad.any()) for grad in found[0])


def body_refusals(group: dist.ProcessGroup, rank: int) -> list[str]:
    """What each rank hears of its own tensors as slots, of odd sizes, and of ranks with different slots."""
    like, texts = [torch.zeros(2, 64, device="cuda")], []
    record = FaultRecord(like[0].device, 4)
    transport = PeerTransport(group, 1, like, record)
    made = plan(torch.tensor([[9, 0, 0, 0], [9, 0, 0, 0]], dtype=torch.int32, device="cuda"), 1)
    for attempt in (
        lambda: transport.weight_sync(made, like, [torch.zeros(1, 64, device="cuda")]),
        lambda: PeerTransport(group, 1, [torch.zeros(2, 3, device="cuda")], record),
        lambda: PeerTransport(group, 1 + rank, like, record),
    ):
        try:
            attempt()
            texts.append("nothing")
        except (InputError, Unavailable, PeerError) as err:
            texts.append(f"{type(err).__name__}: {err}")
    transport.close()
    return texts


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


@pytest.mark.gpu(2)
def test_two_gpus(pool: RankPool) -> None:
    assert pool.run(body_rounds) == [[], []]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("num_local", "slots"), [(2, 2), (4, 1)], ids=["all may have copies", "one of four may"])
def test_gradients_of_training_have_the_bits_of_messages(pool: RankPool, num_local: int, slots: int) -> None:
    for same, replicas, filled in pool.run(body_training, num_local, slots):
        assert all(same) and replicas >= 3 and filled == len(same)


@pytest.mark.gpu(2)
def test_two_gpus_refuse_alike(pool: RankPool) -> None:
    for own, odd, differ in pool.run(body_refusals):
        assert "InputError: slots must lie in peer memory" in own
        assert "a parameter of 3 elements of 4 bytes does not fill whole 16-byte units" in odd
        assert "PeerError" in differ and "slots and parameters" in differ
