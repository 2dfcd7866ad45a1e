"""A small stack of DominoLayers for tests, with inputs, losses, slow collectives and a record of events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ep import DominoLayer, DominoStack, MoEAux, MoEConfig, MoELayer
from moe_ep.dispatch import collectives
from moe_ep.dispatch.transfer import Flight

H = 16
MOE: dict[str, Any] = dict(
    hidden_size=H, expert_intermediate_size=24, num_experts=8, top_k=2, max_tokens=12, num_shared_experts=1,
    shared_intermediate_size=8, aux_loss_coef=0.01, z_loss_coef=0.001,
)  # fmt: skip
# tokens of micro-batch i on rank r: unequal, and none at all here and there
TOKENS = [[4, 0, 3, 5], [2, 6, 0, 0], [7, 1, 0, 3], [0, 2, 5, 9]]


class Note(torch.autograd.Function):
    """Identity that notes when it runs, both ways, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: list[str], nap_s: float) -> Tensor:
        ctx.name, ctx.log, ctx.nap_s = name, log, nap_s
        log.append(name)
        time.sleep(nap_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.log.append(f"d{ctx.name}")
        time.sleep(ctx.nap_s)
        return grads[0], None, None, None


class SmallLayer(DominoLayer):
    """Attention is one matrix. `log` and `nap_s` make pieces note their turns and last."""

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None, index: int, dense: bool) -> None:
        super().__init__()
        self.index = index
        self.mix = nn.Linear(H, H, bias=False)
        self.norm = nn.RMSNorm(H)
        self.mlp = nn.Linear(H, H, bias=False) if dense else None
        self.moe = None if dense else MoELayer(config, group, layer_index=index)
        self.log: list[str] | None = None
        self.nap_s = 0.0
        generator = torch.Generator().manual_seed(index)
        for matrix in (self.mix, self.mlp):
            if matrix is not None:
                matrix.weight.data = torch.randn(H, H, generator=generator) / 4
        if self.moe is not None:
            self.moe.reset_parameters(7)
            self.moe.experts.register_forward_hook(lambda module, args, y: self.note(y, "experts"))

    def note(self, x: Tensor, name: str) -> Tensor:
        if self.log is None:
            return x
        turn = sum(line.startswith(f"{name} {self.index}.") for line in self.log)
        return Note.apply(x, f"{name} {self.index}.{turn}", self.log, self.nap_s)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.note(x + self.mix(x).tanh(), "attention")
        return h, self.norm(h)

    def shared(self, n: Tensor) -> Tensor | None:
        added = super().shared(n) if self.mlp is None else self.mlp(n)
        return None if added is None else self.note(added, "shared")


def small_stack(
    group: dist.ProcessGroup | None,
    changes: dict[str, Any] | None = None,
    dense: tuple[bool, ...] = (False, True, False),
) -> DominoStack:
    """Layers with experts and dense ones; the last one has no shared experts."""
    config = MoEConfig(**(MOE | (changes or {})))
    bare = MoEConfig(**(MOE | (changes or {}) | dict(num_shared_experts=0, shared_intermediate_size=0)))
    last = len(dense) - 1
    return DominoStack(
        SmallLayer(bare if i == last else config, group, i, is_dense) for i, is_dense in enumerate(dense)
    )


def inputs(rank: int, num: int) -> list[Tensor]:
    """M micro-batches of this rank; the second has a sequence dimension."""
    xs = []
    for i in range(num):
        generator = torch.Generator().manual_seed(100 * rank + i)
        shape = (1, TOKENS[i][rank], H) if i == 1 else (TOKENS[i][rank], H)
        xs.append(torch.randn(shape, generator=generator).requires_grad_())
    return xs


def masks(xs: list[Tensor]) -> list[Tensor | None]:
    """The last token of micro-batch 0 is padding; the others have no mask."""
    first = torch.ones(xs[0].shape[:-1], dtype=torch.bool)
    first[-1:] = False
    return [first, *[None] * (len(xs) - 1)]


def loss_of(y: Tensor, auxes: list[MoEAux]) -> Tensor:
    weight = torch.arange(1.0, H + 1, device=y.device)
    return (y.square() * weight).sum() + sum((a.loss * a.num_tokens for a in auxes), y.new_zeros(()))


def loads(stack: nn.Module) -> Tensor:
    return torch.stack([m.router.load_E for m in stack.modules() if isinstance(m, MoELayer)]).clone()


def same(got: Any, want: Any, what: str) -> None:
    """Bit for bit, also in what is None."""
    if isinstance(got, list | tuple):
        assert len(got) == len(want), what
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"{what}[{number}]")
    elif isinstance(got, Tensor):
        assert torch.equal(got, want), f"{what}: {(got - want).abs().max()}"
    else:
        assert got == want, what


class SlowWork:
    """A collective on the communication thread."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


@contextlib.contextmanager
def slow_collectives(delay_s: float, counts_delay_s: float | None = None) -> Iterator[list[SlowWork]]:
    """Every all-to-all and all-gather first waits on its group's thread, one after the other: slow comm streams.

    `delay_s` seconds; in a group made for counts `counts_delay_s`, unless that is None.
    """
    works, threads = list[SlowWork](), dict[Any, ThreadPoolExecutor]()

    def slow(real: Any) -> Any:
        def exchange(*args: Any, group: dist.ProcessGroup) -> None:
            counts = counts_delay_s is not None and "counts" in group.group_name
            time.sleep(counts_delay_s if counts else delay_s)  # type: ignore[arg-type]
            with torch.no_grad():
                real(*args, group=group)

        def start(*args: Any, group: dist.ProcessGroup, async_op: bool) -> SlowWork:
            assert async_op
            thread = threads.setdefault(group, ThreadPoolExecutor(1))
            works.append(SlowWork(thread.submit(exchange, *args, group=group)))
            return works[-1]

        return start

    with (
        mock.patch.object(collectives, "_all_to_all_single", slow(collectives._all_to_all_single)),
        mock.patch.object(collectives, "_all_gather_single", slow(collectives._all_gather_single)),
    ):
        yield works
    for thread in threads.values():
        thread.shutdown()


@contextlib.contextmanager
def recorded(stack: DominoStack) -> Iterator[list[str]]:
    """Turns of compute pieces ("attention 0.1": layer 0, micro-batch 1), launches and waits of transfers, in order."""
    log: list[str] = []
    for layer in stack.layers:
        layer.log = log  # type: ignore[assignment]

    def noting(method: str, text: str) -> Any:
        real = getattr(Flight, method)

        def call(flight: Flight, *args: Any) -> Any:
            words = flight._what.replace(",", "").split()  # dispatch of layer 0, micro-batch 1
            log.append(f"{text}{words[0]} {words[3]}.{words[5]}")
            return real(flight, *args)

        return mock.patch.object(Flight, method, call)

    with (
        noting("launch_forward", "launch "),
        noting("wait_forward", "wait "),
        noting("launch_backward", "launch d"),
        noting("wait_backward", "wait d"),
    ):
        yield log
    for layer in stack.layers:
        layer.log = None
