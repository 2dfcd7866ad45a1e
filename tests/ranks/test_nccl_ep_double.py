"""The stand-in for NCCL EP's module refuses what it says it refuses: each numbered contract, broken once.

Contract 1, ranks at different calls, needs two ranks and stands in test_nccl_ep; 15 is how handles are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.testing.ranks import run_ranks
from tests.ranks import nccl_ep_double as double

Break = Callable[["Calls"], object]


class Calls:
    """One rank, four experts, three tokens of 16 float32 on a flat or expert-major handle."""

    def __init__(self, comm: double.Communicator, **fields: Any) -> None:
        self.comm = comm
        sizes = {"num_experts": 4, "max_dispatch_tokens_per_rank": 4, "max_token_bytes": 64, "num_topk": 2}
        given = {"algorithm": double.Algorithm.HIGH_THROUGHPUT, **sizes, **fields}
        self.group = double.Group.create(comm, double.GroupConfig(**given))
        self.ids = torch.tensor([[0, 1], [2, -1], [3, 0]])
        self.x, self.weights = torch.ones(3, 16), torch.ones(3, 2)

    def handle(self, layout: Any = double.Layout.EXPERT_MAJOR, ids: Any = None) -> Any:
        ids = self.ids if ids is None else ids
        return self.group.create_handle(layout, double.Tensor(ids), stream=None)

    def forward(self, handle: Any, rows: int = 5, **other: Any) -> Any:
        tensors = {"x": self.x, "out": torch.empty(rows, 16), "got": torch.empty(rows), "weights": self.weights} | other
        wrapped = {name: None if t is None else double.Tensor(t) for name, t in tensors.items()}
        handle.dispatch(
            double.DispatchInputs(tokens=wrapped["x"], topk_weights=wrapped["weights"]),
            double.DispatchOutputs(tokens=wrapped["out"], topk_weights=wrapped["got"], topk_idx=wrapped.get("ids")),
            config=double.DispatchConfig(pass_direction=double.PassDir.FWD),
            stream=None,
        )
        return handle

    def backward(self, handle: Any, weights: Any = None) -> None:
        inputs = double.DispatchInputs(tokens=double.Tensor(self.x), topk_weights=weights)
        outputs = double.DispatchOutputs(tokens=double.Tensor(torch.empty(5, 16)))
        config = double.DispatchConfig(pass_direction=double.PassDir.BWD)
        handle.dispatch(inputs, outputs, config=config, stream=None)

    def combine(self, handle: Any, weights: Any = None, direction: Any = double.PassDir.FWD, rows: int = 3) -> None:
        inputs = double.CombineInputs(tokens=double.Tensor(torch.ones(5, 16)), topk_weights=weights)
        outputs = double.CombineOutputs(tokens=double.Tensor(torch.empty(rows, 16)))
        handle.combine(inputs, outputs, config=double.CombineConfig(pass_direction=direction), stream=None)


def low(comm: double.Communicator) -> Calls:
    calls = Calls(comm, algorithm=double.Algorithm.LOW_LATENCY, max_token_bytes=2048)
    calls.x = torch.ones(3, 512)
    return calls


def send(calls: Calls, handle: Any, keep: list[Any]) -> None:
    """A low-latency dispatch that is not completed; what has to live is put into `keep`."""
    shapes = {"tokens": (1, 4, 512), "topk_weights": (1, 4, 2)}
    outputs = double.DispatchOutputs(
        **{name: double.Tensor(torch.empty(shape)) for name, shape in shapes.items()},
        topk_idx=double.Tensor(torch.empty(1, 4, 2, dtype=torch.int32)),
    )
    inputs = double.DispatchInputs(tokens=double.Tensor(calls.x), topk_weights=double.Tensor(calls.weights))
    info = double.LayoutInfo(src_rank_counters=double.Tensor(torch.empty(1, dtype=torch.int32)))
    keep += [inputs, outputs, info]
    handle.dispatch(inputs, outputs, layout_info=info, config=double.DispatchConfig(send_only=1), stream=None)


def change_ids(calls: Calls) -> None:
    keep: list[Any] = []
    handle = calls.handle(double.Layout.RANK_MAJOR)
    send(calls, handle, keep)
    calls.ids[0, 0] = 3
    handle.complete(stream=None)


def lose_descriptors(calls: Calls) -> None:
    handle = calls.handle(double.Layout.RANK_MAJOR)
    send(calls, handle, [])
    handle.complete(stream=None)


def send_twice(calls: Calls) -> None:
    keep: list[Any] = []
    for handle in (calls.handle(double.Layout.RANK_MAJOR), calls.handle(double.Layout.RANK_MAJOR)):
        send(calls, handle, keep)


def destroyed(handle: Any) -> Any:
    handle.destroy()
    return handle


def flat(calls: Calls, **other: Any) -> Any:
    """A forward over the flat layout, three rows."""
    given = {"got": torch.empty(3, 2), "ids": torch.empty(3, 2, dtype=torch.int64)} | other
    return calls.forward(calls.handle(double.Layout.FLAT), rows=3, **given)


def combine_sent(calls: Calls, direction: Any = double.PassDir.FWD, dispatched: bool = True, rows: int = 4) -> None:
    """A low-latency combine, behind a dispatch that is completed."""
    keep: list[Any] = []
    handle = calls.handle(double.Layout.RANK_MAJOR)
    if dispatched:
        send(calls, handle, keep)
        handle.complete(stream=None)
    inputs = double.CombineInputs(tokens=double.Tensor(torch.ones(1, rows, 512)))
    outputs = double.CombineOutputs(tokens=double.Tensor(torch.empty(3, 512)))
    handle.combine(inputs, outputs, config=double.CombineConfig(pass_direction=direction), stream=None)


HT: dict[str, tuple[int, Break]] = {
    "no bound of tokens": (2, lambda c: Calls(c.comm, max_dispatch_tokens_per_rank=0)),
    "top-k beyond the group's": (2, lambda c: c.handle(ids=torch.zeros(1, 3, dtype=torch.int64))),
    "rows wider than the group's": (3, lambda c: c.forward(c.handle(), x=torch.ones(3, 32), out=torch.empty(5, 32))),
    "ids of floats": (6, lambda c: c.handle(ids=torch.ones(3, 2))),
    "a low-latency layout": (7, lambda c: c.handle(double.Layout.RANK_MAJOR)),
    "float64 rows": (7, lambda c: c.forward(c.handle(), x=torch.ones(3, 8).double())),
    "float64 weights": (7, lambda c: c.forward(c.handle(), weights=torch.ones(3, 2).double())),
    "weights of another top-k": (7, lambda c: c.forward(c.handle(), weights=torch.ones(3, 1))),
    "two received weights a row": (7, lambda c: c.forward(c.handle(), got=torch.empty(5, 2))),
    "ids of grouped rows": (7, lambda c: c.forward(c.handle(), ids=torch.empty(5, 2, dtype=torch.int64))),
    "flat rows without ids": (7, lambda c: flat(c, ids=None)),
    "flat rows with int32 ids": (7, lambda c: flat(c, ids=torch.empty(3, 2, dtype=torch.int32))),
    "backward combine without room for weights": (
        9,
        lambda c: c.combine(c.forward(c.handle()), double.Tensor(torch.ones(5)), double.PassDir.BWD),
    ),
    "dispatch of a destroyed handle": (11, lambda c: c.forward(destroyed(c.handle()))),
    "combine of a destroyed handle": (11, lambda c: c.combine(destroyed(c.forward(c.handle())))),
    "a handle destroyed twice": (11, lambda c: destroyed(destroyed(c.handle()))),
    "update of a destroyed handle": (11, lambda c: destroyed(c.handle()).update(double.Tensor(c.ids), stream=None)),
    "a handle of a destroyed group": (11, lambda c: (c.group.destroy(), c.handle())),
    "budget below tokens": (2, lambda c: Calls(c.comm, max_recv_tokens_per_rank=3)),
    "drop in eager mode": (2, lambda c: Calls(c.comm, overflow_policy=double.OverflowPolicy.DROP)),
    "eager expert-major without top-k": (2, lambda c: Calls(c.comm, num_topk=0).handle()),
    "rows of 60 bytes": (3, lambda c: Calls(c.comm, max_token_bytes=60)),
    "rows of 12 elements": (3, lambda c: c.forward(c.handle(), x=torch.ones(3, 12))),
    "rows of 24 bytes": (3, lambda c: c.forward(c.handle(), x=torch.ones(3, 6))),
    "rows at an odd address": (3, lambda c: c.forward(c.handle(), x=torch.ones(49)[1:].view(3, 16))),
    "three experts": (4, lambda c: Calls(c.comm, num_experts=3)),
    "strided rows": (5, lambda c: c.forward(c.handle(), x=torch.ones(16, 3).t())),
    "ids beyond the experts": (6, lambda c: c.handle(ids=torch.tensor([[0, 4]]))),
    "too many tokens": (6, lambda c: c.handle(ids=torch.zeros(5, 2, dtype=torch.int64))),
    "another top-k": (6, lambda c: c.handle().update(double.Tensor(torch.zeros(1, 1, dtype=torch.int64)), stream=None)),
    "rows of another routing": (7, lambda c: c.forward(c.handle(), x=torch.ones(2, 16), weights=torch.ones(2, 2))),
    "forward without weights": (7, lambda c: c.forward(c.handle(), weights=None)),
    "backward without forward": (7, lambda c: c.backward(c.handle())),
    "backward with weights": (7, lambda c: c.backward(c.forward(c.handle()), double.Tensor(c.weights))),
    "combine before dispatch": (7, lambda c: c.combine(c.handle())),
    "room for four of five rows": (8, lambda c: c.forward(c.handle(), rows=4)),
    "forward combine with weights": (9, lambda c: c.combine(c.forward(c.handle()), double.Tensor(torch.ones(5)))),
    "backward combine without": (9, lambda c: c.combine(c.forward(c.handle()), direction=double.PassDir.BWD)),
    "outputs of another length": (9, lambda c: c.combine(c.forward(c.handle()), rows=2)),
    "overflow without drop": (10, lambda c: Calls(c.comm, max_recv_tokens_per_rank=4).handle()),
    "group before its handles": (11, lambda c: (c.handle(), c.group.destroy())),
    "communicator before its groups": (11, lambda c: c.comm.destroy()),
}
LL: dict[str, tuple[int, Break]] = {
    "two sends": (12, send_twice),
    "a group destroyed under way": (12, lambda c: (send(c, c.handle(double.Layout.RANK_MAJOR), []), c.group.destroy())),
    "changed ids": (13, change_ids),
    "lost descriptors": (13, lose_descriptors),
    "combine before dispatch, low latency": (7, lambda c: combine_sent(c, dispatched=False)),
    "a backward combine": (14, lambda c: combine_sent(c, double.PassDir.BWD)),
    "rows of fewer slots": (14, lambda c: combine_sent(c, rows=3)),
    "another layout": (14, lambda c: c.handle(double.Layout.FLAT)),
    "rows of 24 elements": (
        14,
        lambda c: (setattr(c, "x", torch.ones(3, 24)), send(c, c.handle(double.Layout.RANK_MAJOR), [])),
    ),
}


def break_all(group: dist.ProcessGroup, rank: int) -> dict[str, str]:
    said = {}
    for cases, make_calls in ((HT, Calls), (LL, low)):
        for name, (number, breaking) in cases.items():
            calls = make_calls(double.Communicator(group))
            try:
                breaking(calls)
                said[name] = "nothing was raised"
            except double.Misuse as err:
                said[name] = "as it should" if str(err).startswith(f"contract {number}: ") else str(err)
    return said


def test_the_stand_in_refuses_what_breaks_each_contract() -> None:
    (said,) = run_ranks(break_all, 1)
    assert said == dict.fromkeys((*HT, *LL), "as it should")
    assert {number for number, _ in (*HT.values(), *LL.values())} == set(range(2, 15))


def make_all_right(group: dist.ProcessGroup, rank: int) -> None:
    calls = Calls(double.Communicator(group))
    calls.combine(calls.forward(calls.handle()))
    flat(Calls(double.Communicator(group)))
    combine_sent(low(double.Communicator(group)))


def test_calls_made_right_pass() -> None:
    run_ranks(make_all_right, 1)
