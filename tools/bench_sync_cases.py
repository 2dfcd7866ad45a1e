"""What moves experts between the GPUs of one host, as cases of a benchmark: a transport of replicas, or plain copies.

Slot s of every rank belongs to expert s of the next rank: weights come from there and gradients go there, so that every
link carries S experts in one direction, all ranks at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.dispatch.peer_memory import PeerMemory
from moe_ep.replica import Plan
from moe_ep.replica.transport import Tensors, Transport

from .bench_setting import Place
from .timing import Stopwatch, Untimed

NUM_LOCAL = 4
ELEMENT_BYTES = {"push": 2, "pull": 4}  # bfloat16 weights, float32 gradients
_ALIGNMENT = 256


class SyncCase(ABC):
    """Slots of this rank and what belongs in them.

    Args:
        place: device and ranks.
        slots: weights [S, n] and gradients [S, n] of each parameter of an expert.

    Attributes:
        masters: bfloat16 [L, n] of this rank.
        num_wrong: tensors that the checks found wrong, on any rank.
    """

    def __init__(self, place: Place, slots: tuple[Tensors, Tensors]) -> None:
        self.place, self.num_wrong = place, 0
        self.weights, self.grads = slots
        self.sizes = [weight.shape[1] for weight in self.weights]
        self.slots = len(self.weights[0])
        self.masters = self.drawn(place.rank)

    def drawn(self, rank: int) -> list[Tensor]:
        """Masters of a rank, the same wherever they are drawn."""
        gen = torch.Generator(self.place.device).manual_seed(rank)
        return [
            torch.randn(NUM_LOCAL, n, device=self.place.device, generator=gen, dtype=torch.bfloat16) for n in self.sizes
        ]

    def fill(self) -> None:
        """Gradients of its own in this rank's slots."""
        for slot, weight in zip(self.grads, self.drawn(self.place.rank + 100), strict=True):
            slot.copy_(weight[: self.slots].float())

    def given(self) -> list[Tensor]:
        """Float32 [S, n], what the rank before filled its slots with: gradients of this rank's masters."""
        before = (self.place.rank - 1) % self.place.num_ranks
        return [weight[: self.slots].float() for weight in self.drawn(before + 100)]

    def wrong_weights(self) -> int:
        """Slots that do not hold the weights of the next rank's experts."""
        theirs = self.drawn((self.place.rank + 1) % self.place.num_ranks)
        pairs = zip(self.weights, theirs, strict=True)
        return sum(not torch.equal(slot, master[: self.slots]) for slot, master in pairs)

    @abstractmethod
    def run(self, iteration: int, watch: Stopwatch) -> None:
        """Both operations, with the marks push and pull."""

    @abstractmethod
    def wrong(self) -> int:
        """How many tensors one push and one pull leave wrong. Collective."""

    def close(self) -> None:
        """Free what is not torch's."""
        return


class TransportCase(SyncCase):
    """A transport with its slots. `close_transport`: whether it has memory of its own."""

    def __init__(
        self, place: Place, transport: Transport, slots: tuple[Tensors, Tensors], close_transport: bool = False
    ) -> None:
        super().__init__(place, slots)
        self.transport, self._closes = transport, close_transport
        self.plan = next_rank_plan(place, self.slots)
        self.totals = [torch.zeros(NUM_LOCAL, n, device=place.device) for n in self.sizes]

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """See SyncCase."""
        watch.begin()
        self.transport.weight_sync(self.plan, self.masters, self.weights).wait()
        watch.mark("push")
        watch.begin()
        self.transport.grad_reduce(self.plan, self.grads, self.totals).wait()
        watch.mark("pull")

    def wrong(self) -> int:
        """Slots with the next rank's weights, then empty; totals with what the rank before had."""
        self.fill()
        for total in self.totals:
            total.fill_(1)
        self.run(0, Untimed())
        wrong = self.wrong_weights() + sum(bool(slot.any()) for slot in self.grads)
        for total, grads in zip(self.totals, self.given(), strict=True):
            want = torch.ones_like(total)
            want[: self.slots] += grads
            wrong += not torch.equal(total, want)
        return wrong

    def close(self) -> None:
        """See SyncCase."""
        if self._closes:
            self.transport.close()


class CopyCase(SyncCase):
    """The bytes of both operations by copies alone, which wait for nobody and add nothing up.

    Args:
        place, slots: see SyncCase.
        theirs: the slots of the rank before, mapped here.
        memory: what the slots lie in.
    """

    def __init__(
        self,
        place: Place,
        slots: tuple[Tensors, Tensors],
        theirs: tuple[Tensors, Tensors],
        memory: PeerMemory | None = None,
    ) -> None:
        super().__init__(place, slots)
        self.theirs, self._memory = theirs, memory
        self.pulled = [torch.zeros(self.slots, n, device=place.device) for n in self.sizes]

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """See SyncCase. Contiguous tensors of one dtype: one asynchronous memory copy each."""
        watch.begin()
        for there, master in zip(self.theirs[0], self.masters, strict=True):
            there.copy_(master[: self.slots])
        watch.mark("push")
        watch.begin()
        for here, there in zip(self.pulled, self.theirs[1], strict=True):
            here.copy_(there)
        watch.mark("pull")

    def wrong(self) -> int:
        """Slots with the next rank's weights, and here what the rank before had."""
        self.fill()
        self.meet()
        self.run(0, Untimed())
        self.meet()
        pairs = zip(self.pulled, self.given(), strict=True)
        return self.wrong_weights() + sum(not torch.equal(got, want) for got, want in pairs)

    def meet(self) -> None:
        """All ranks are through with what they issued."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        dist.barrier(self.place.group)

    def close(self) -> None:
        """See SyncCase."""
        self.theirs = ((), ())
        if self._memory is not None:
            self._memory.close()


def copy_case(place: Place, slots: int, sizes: Sequence[int]) -> CopyCase:
    """Slots in peer memory of their own. Collective.

    Raises:
        Unavailable: the GPUs cannot be mapped, or memory is short.
    """
    forms = [(n, torch.bfloat16) for n in sizes] + [(n, torch.float32) for n in sizes]
    places, end = [], 0
    for n, dtype in forms:
        places.append(end)
        end += -(-slots * n * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = PeerMemory(end + _ALIGNMENT, place.group, place.device, stop_at=end, advice="use fewer slots")
    before = (place.rank - 1) % place.num_ranks
    kinds = list(zip(places, forms, strict=True))
    mine = [memory.part(at, (slots, n), dtype) for at, (n, dtype) in kinds]
    theirs = [memory.part_of(before, at, (slots, n), dtype) for at, (n, dtype) in kinds]
    half = len(sizes)
    return CopyCase(place, (mine[:half], mine[half:]), (theirs[:half], theirs[half:]), memory)


def next_rank_plan(place: Place, slots: int) -> Plan:
    """Slot s of every rank holds expert s of the next one; rows do not matter here."""
    ranks, experts = place.num_ranks, place.num_ranks * NUM_LOCAL
    filled = [[(r + 1) % ranks * NUM_LOCAL + s for s in range(slots)] for r in range(ranks)]
    zeros = torch.zeros(ranks, experts, dtype=torch.int32, device=place.device)
    return Plan(
        load=zeros,
        quota=zeros.t().contiguous(),
        instances=torch.tensor(filled, dtype=torch.int32, device=place.device),
        max_load=zeros.sum(),
        exact=torch.tensor(False),
    )
