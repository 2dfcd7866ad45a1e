"""A stand-in for the module nccl.ep that moves rows over gloo and refuses what the library's documents forbid.

It is no emulation of the library's speed, streams or memory; it checks our adapter's calls, on machines without GPUs.
Documents, all of NVIDIA/nccl-extensions as packed in nccl-extensions 0.1.0 (paths below nccl_ep/ and python/):

 1. include/nccl_ep.h, ncclEpCreateGroup, UpdateHandle, Dispatch, Combine: "collective and must be invoked by all ranks
    in the group": the ranks' calls are compared one by one, with pass and layout.
 2. nccl_ep.h, max_dispatch_tokens_per_rank: "Must be the same across all ranks", > 0; max_recv_tokens_per_rank: ">=
    max_dispatch_tokens_per_rank", identical across ranks; with 0, no NCCL_EP_OVERFLOW_DROP, and num_topk is required
    for expert-major.
 3. nccl_ep.h, max_token_bytes: "multiple of 16 bytes" in HT; rows no longer than that, 16-byte multiples and aligned;
    device/ht_ep.cuh: a multiple of 8 elements.
 4. nccl_ep.cc, ncclEpInitHandle: "num_experts % nRanks == 0"; device/ht_ep_adapter.cu: experts of a host a multiple of
    4, max_dispatch_tokens_per_rank * ranks of a host a multiple of 4.
 5. python/nccl/ep/tensor.py: a descriptor is a pointer and a shape, no strides: tensors must be contiguous.
 6. nccl_ep.cc, ncclEpUpdateHandle: topk_idx 2D int32 or int64, at most max_dispatch_tokens_per_rank tokens, the
    handle's num_topk; counters share one integer type. device/ht_ep_adapter.cu: the routing is a bitmap, so an expert
    twice in a token is one route; ids < 0 are none, and ids beyond the experts would write out of bounds.
 7. nccl_ep.h, ncclEpDispatch: routing comes from the handle: update before dispatch, and an update forgets the routing
    that backward needs. FWD requires inputs.topk_weights float32 [T, K], outputs.topk_weights [N] (expert-major) or
    [N, K] and topk_idx int64 [N, K] (flat); BWD forbids all three.
 8. nccl_ep.h: outputs hold max_recv_tokens_per_rank rows, or in eager mode as many as recv_total_counter says. Rows
    behind those received are not written.
 9. nccl_ep.h, ncclEpCombine: rows as dispatch gave them out; FWD forbids topk_weights, BWD requires
    inputs.topk_weights and outputs.topk_weights [T, K]. Weights are not applied.
10. nccl_ep.h, NCCL_EP_OVERFLOW_DROP: overflowing rows are dropped, recv_total_counter tells the true total; TRAP
    aborts.
11. python/nccl/ep/handle.py, group.py, core/communicator.py: nothing may be used after destroy; handles go before
    their group, the group before its communicator, whose destroy is collective.
12. device/ll_ep.cuh, selectLowLatencyEpoch: one send under way in a group; complete it before the next operation.
13. nccl_ep.cc, ncclEpDispatch and ncclEpCombine in LL mode: a completion reads the descriptors and the handle's ids
    again, so they must live, unchanged, until it is done; ids until the combine is.
14. nccl_ep.h, LL rank-major: topk_weights in; out tokens [R, C, H], topk_weights and topk_idx int32 [R, C, K]; rows a
    multiple of 512 elements (device/ll_ep.cuh: "Invalid hidden", "Invalid vectorization"); layout_info belongs to
    dispatch; no backward pass. Slots are filled in any order; src_rank_counters tells how many.
15. nccl_ep.h, ncclEpInitHandle: with automatic buffers the first handle of a layout and top-k is made by all ranks.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor as T


class Misuse(AssertionError):
    """A call that breaks a documented contract; begins with its number above."""


def demand(holds: bool, contract: int, text: str) -> None:
    if not holds:
        raise Misuse(f"contract {contract}: {text}")


class Algorithm(enum.IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(enum.IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(enum.IntEnum):
    FWD = 0
    BWD = 1


class OverflowPolicy(enum.IntEnum):
    AUTO = 0
    TRAP = 1
    DROP = 2


class ExpertIdKind(enum.IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class Tensor:
    def __init__(self, buffer: T) -> None:
        demand(buffer.is_contiguous(), 5, f"strides {buffer.stride()} of {tuple(buffer.shape)}")
        demand(buffer.dim() >= 1, 5, "no dimension")
        self.buffer = buffer


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    max_num_sms: int = 0
    timeout_ns: int = 0
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0


@dataclass(kw_only=True)
class HandleConfig:
    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class DispatchConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD


@dataclass(kw_only=True)
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor
    topk_weights: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor
    topk_weights: Tensor | None = None
    topk_idx: Tensor | None = None


CombineInputs = CombineOutputs = DispatchInputs
alive: dict[str, int] = {"communicators": 0, "groups": 0, "handles": 0}


class Communicator:
    """Compares the ranks' calls one by one and exchanges what they bring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_groups = self.number = 0
        self.open = True
        alive["communicators"] += 1

    def exchange(self, call: Any, value: Any) -> list[Any]:
        demand(self.open, 11, f"{call} on a destroyed communicator")
        self.number += 1
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, ((self.number, call), value), group=self.group)
        calls = [made for made, _ in everybody]
        demand(len(set(map(str, calls))) == 1, 1, f"the ranks are at different calls: {calls}")
        return [brought for _, brought in everybody]

    def destroy(self) -> None:
        demand(self.num_groups == 0, 11, f"{self.num_groups} groups outlive their communicator")
        self.exchange("destroy", None)
        self.open = False
        alive["communicators"] -= 1

    def abort(self) -> None:
        self.open = False
        alive["communicators"] -= 1


class Group:
    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        self.comm, self.config, self.num_handles, self.open = comm, config, 0, True
        self.eager = config.max_recv_tokens_per_rank == 0
        self.num_local = config.num_experts // comm.size
        self.under_way: LowLatencyHandle | None = None
        self.sized_for: set[int] = set()
        comm.num_groups += 1
        alive["groups"] += 1

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> Group:
        c, on_host = config, min(comm.size, 8)
        demand(c.max_dispatch_tokens_per_rank > 0, 2, "no max_dispatch_tokens_per_rank")
        recv = c.max_recv_tokens_per_rank
        demand(recv == 0 or recv >= c.max_dispatch_tokens_per_rank, 2, f"max_recv_tokens_per_rank = {recv}")
        demand(recv > 0 or c.overflow_policy != OverflowPolicy.DROP, 2, "DROP in eager mode")
        demand(c.num_topk <= c.num_experts, 2, f"num_topk = {c.num_topk} of {c.num_experts} experts")
        demand(c.max_token_bytes % 16 == 0 and c.max_token_bytes > 0, 3, f"max_token_bytes = {c.max_token_bytes}")
        demand(c.num_experts % comm.size == 0, 4, f"{c.num_experts} experts on {comm.size} ranks")
        if c.algorithm == Algorithm.HIGH_THROUGHPUT:
            demand(c.num_experts // comm.size * on_host % 4 == 0, 4, f"{c.num_experts} experts, {comm.size} ranks")
            demand(c.max_dispatch_tokens_per_rank * on_host % 4 == 0, 4, f"{c.max_dispatch_tokens_per_rank} tokens")
        configs = comm.exchange("create group", c)
        demand(all(other == c for other in configs), 2, f"the ranks' configurations differ: {configs}")
        return cls(comm, config)

    def create_handle(
        self, layout: Layout, topk_idx: Tensor, *, layout_info: Any = None, config: Any = None, stream: Any
    ) -> Handle:
        demand(self.open, 11, "create_handle on a destroyed group")
        eager_grouped = self.eager and layout == Layout.EXPERT_MAJOR
        demand(not eager_grouped or self.config.num_topk > 0, 2, "eager expert-major without num_topk")
        if self.config.algorithm == Algorithm.LOW_LATENCY:
            return self._low_latency_handle(layout, topk_idx, layout_info)
        demand(layout in (Layout.FLAT, Layout.EXPERT_MAJOR), 7, f"layout {layout!r}")
        handle = Handle(self, layout, topk_idx.buffer.shape[1])
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def _low_latency_handle(self, layout: Layout, topk_idx: Tensor, layout_info: Any) -> LowLatencyHandle:
        demand(layout == Layout.RANK_MAJOR, 14, f"layout {layout!r}")
        num_topk = topk_idx.buffer.shape[1]
        if num_topk not in self.sized_for:
            self.comm.exchange(("allocate", layout, num_topk), None)
            self.sized_for.add(num_topk)
        handle = LowLatencyHandle(self, layout, num_topk)
        handle.update(topk_idx, layout_info=layout_info, stream=None)
        return handle

    def destroy(self) -> None:
        demand(self.under_way is None, 12, "a group destroyed with a send under way")
        demand(self.num_handles == 0, 11, f"{self.num_handles} handles outlive their group")
        demand(self.open, 11, "a group destroyed twice")
        self.open = False
        self.comm.num_groups -= 1
        alive["groups"] -= 1


class Handle:
    """`slots`: (source rank, token, local expert) of expert rows; `tokens`: (source rank, token) of flat rows."""

    def __init__(self, group: Group, layout: Layout, num_topk: int) -> None:
        limit = group.config.num_topk
        demand(limit == 0 or num_topk <= limit, 2, f"top-k {num_topk}, the group was made for {limit}")
        self.group, self.layout, self.num_topk, self.open = group, layout, num_topk, True
        self.state = "made"
        group.num_handles += 1
        alive["handles"] += 1

    def destroy(self) -> None:
        demand(self.open, 11, "a handle destroyed twice")
        self.open = False
        self.group.num_handles -= 1
        alive["handles"] -= 1

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: Any) -> None:
        demand(self.open, 11, "update of a destroyed handle")
        ids, config = topk_idx.buffer, self.group.config
        demand(ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64), 6, f"ids {ids.dtype} {tuple(ids.shape)}")
        demand(ids.shape[1] == self.num_topk, 6, f"top-k {ids.shape[1]} on a handle of {self.num_topk}")
        demand(ids.shape[0] <= config.max_dispatch_tokens_per_rank, 6, f"{ids.shape[0]} tokens")
        demand(bool((ids < config.num_experts).all()), 6, f"ids up to {ids.max()} of {config.num_experts} experts")
        self.ids = ids.clone()
        everybody = self.group.comm.exchange(("update", self.layout), self.ids)
        self._route(everybody)
        self._tell(layout_info)
        self.state = "updated"

    @property
    def _drops(self) -> bool:
        return self.group.config.overflow_policy == OverflowPolicy.DROP

    def _route(self, everybody: list[T]) -> None:
        num_local, first = self.group.num_local, self.group.comm.rank * self.group.num_local
        chosen = [
            (source, token, sorted({e - first for e in row if first <= e < first + num_local}))
            for source, ids in enumerate(everybody)
            for token, row in enumerate(ids.tolist())
        ]
        self.tokens = [(source, token) for source, token, local in chosen if local]
        self.slots = [(s, t, e) for e in range(num_local) for s, t, local in chosen if e in local]
        self.all_ids = everybody
        budget = self.group.config.max_recv_tokens_per_rank
        self.total = len(self.slots if self.layout == Layout.EXPERT_MAJOR else self.tokens)
        self.counts = [sum(e == slot[2] for slot in self.slots) for e in range(num_local)]
        if budget and self.total > budget:
            demand(
                self.group.config.overflow_policy == OverflowPolicy.DROP, 10, f"{self.total} rows, room for {budget}"
            )
            self.tokens, self.slots = self.tokens[:budget], self.slots[:budget]

    def _tell(self, info: LayoutInfo | None) -> None:
        given = [] if info is None else [t for t in (info.expert_counters, info.recv_total_counter) if t is not None]
        demand(len({t.buffer.dtype for t in given}) <= 1, 6, "counters of several integer types")
        if info is not None and info.expert_counters is not None:
            demand(info.expert_counters.buffer.shape[0] >= self.group.num_local, 6, "expert_counters are too short")
            info.expert_counters.buffer[: self.group.num_local] = torch.tensor(self.counts)
        if info is not None and info.recv_total_counter is not None:
            info.recv_total_counter.buffer.fill_(self.total)

    def _check_rows(self, rows: T, contract: int) -> None:
        size = rows.shape[1] * rows.element_size()
        demand(rows.dim() == 2 and size % 16 == rows.shape[1] % 8 == 0, 3, f"rows {tuple(rows.shape)} of {size} bytes")
        demand(size <= self.group.config.max_token_bytes, 3, f"rows of {size} bytes")
        demand(rows.data_ptr() % 16 == 0, 3, "rows that are not aligned to 16 bytes")
        demand(rows.dtype in (torch.float32, torch.float16, torch.bfloat16), contract, f"rows of {rows.dtype}")

    def dispatch(
        self, inputs: Any, outputs: Any, *, layout_info: Any = None, config: DispatchConfig, stream: Any
    ) -> None:
        demand(self.open, 11, "dispatch of a destroyed handle")
        forward = config.pass_direction == PassDir.FWD
        x, out = inputs.tokens.buffer, outputs.tokens.buffer
        self._check_rows(x, 7)
        self._check_rows(out, 8)
        demand(x.shape[0] == self.ids.shape[0], 7, f"{x.shape[0]} rows for a routing of {self.ids.shape[0]} tokens")
        demand(self.state != "updated" or forward, 7, "backward of a routing that has had no forward")
        room = self.group.config.max_recv_tokens_per_rank or self.total
        demand(out.shape[0] >= room and out.shape[1] == x.shape[1], 8, f"outputs {tuple(out.shape)}, {room} needed")
        weights = self._check_dispatch_weights(inputs, outputs, out.shape[0]) if forward else None
        if not forward:
            extra = (inputs.topk_weights, outputs.topk_weights, outputs.topk_idx)
            demand(all(t is None for t in extra), 7, "weights or ids in a backward dispatch")
        brought = self.group.comm.exchange(("dispatch", config.pass_direction, self.layout), (x.clone(), weights))
        grouped = self.layout == Layout.EXPERT_MAJOR
        if not self.group.eager and grouped:
            out[:room] = 0  # launch_dispatch_permute's zeroing where rows may be dropped
        for place, (source, token, *_) in enumerate(self.slots if grouped else self.tokens):
            out[place] = brought[source][0][token]
        if forward:
            self._give_weights(brought, outputs)
            self.state = "dispatched"

    def _check_dispatch_weights(self, inputs: Any, outputs: Any, num_rows: int) -> T:
        flat = self.layout == Layout.FLAT
        demand(inputs.topk_weights is not None and outputs.topk_weights is not None, 7, "forward without weights")
        weights, got = inputs.topk_weights.buffer, outputs.topk_weights.buffer
        demand(weights.dtype == got.dtype == torch.float32, 7, f"weights of {weights.dtype} and {got.dtype}")
        demand(weights.shape == self.ids.shape, 7, f"weights {tuple(weights.shape)}, ids {tuple(self.ids.shape)}")
        wanted = (num_rows, self.num_topk) if flat else (num_rows,)
        demand(tuple(got.shape) == wanted, 7, f"received weights {tuple(got.shape)}, not {wanted}")
        demand((outputs.topk_idx is not None) == flat, 7, "received ids belong to the flat layout alone")
        if flat:
            ids = outputs.topk_idx.buffer
            demand(ids.dtype == torch.int64 and ids.shape == got.shape, 7, f"received ids {ids.dtype} {ids.shape}")
        return weights.clone()

    def _weight(self, brought: list[Any], source: int, token: int, local: int) -> float:
        expert = self.group.comm.rank * self.group.num_local + local
        k = self.all_ids[source][token].tolist().index(expert)
        return brought[source][1][token, k].item()

    def _locals(self, source: int, token: int) -> list[int]:
        first = self.group.comm.rank * self.group.num_local
        ids = self.all_ids[source][token].tolist()
        return sorted({e - first for e in ids if first <= e < first + self.group.num_local})

    def _give_weights(self, brought: list[Any], outputs: Any) -> None:
        weights = outputs.topk_weights.buffer
        if self.layout == Layout.EXPERT_MAJOR:
            for place, (source, token, local) in enumerate(self.slots):
                weights[place] = self._weight(brought, source, token, local)
            return
        ids = outputs.topk_idx.buffer
        for place, (source, token) in enumerate(self.tokens):
            ids[place], weights[place] = -1, 0
            for column, local in enumerate(self._locals(source, token)):
                ids[place, column] = local
                weights[place, column] = self._weight(brought, source, token, local)

    def combine(self, inputs: Any, outputs: Any, *, config: CombineConfig, stream: Any) -> None:
        demand(self.open, 11, "combine of a destroyed handle")
        backward = config.pass_direction == PassDir.BWD
        rows, out = inputs.tokens.buffer, outputs.tokens.buffer
        self._check_rows(rows, 9)
        self._check_rows(out, 9)
        demand(self.state == "dispatched", 7, f"combine on a handle that is {self.state}")
        demand(out.shape == (self.ids.shape[0], rows.shape[1]), 9, f"outputs {tuple(out.shape)}")
        weights = inputs.topk_weights
        demand((weights is not None) == backward, 9, "weights belong to the backward combine alone")
        demand(not backward or outputs.topk_weights is not None, 9, "no outputs.topk_weights")
        mine = self._reduce_locally(rows), self._local_weights(weights.buffer) if backward else {}
        brought = self.group.comm.exchange(("combine", config.pass_direction, self.layout), mine)
        me = self.group.comm.rank
        for token in range(out.shape[0]):
            total = torch.zeros(rows.shape[1], dtype=torch.float32)
            for partial, _ in brought:
                if (me, token) in partial:
                    total += partial[me, token]
            out[token] = total.to(out.dtype)
        if backward:
            self._bring_weights_home([weights for _, weights in brought], outputs.topk_weights.buffer)

    def _reduce_locally(self, rows: T) -> dict[tuple[int, int], T]:
        """Sums of this rank's rows for each token, in float32, rounded for the trip."""
        if self.layout == Layout.FLAT:
            return {where: rows[place].clone() for place, where in enumerate(self.tokens)}
        sums: dict[tuple[int, int], T] = {}
        for place, (source, token, _) in enumerate(self.slots):
            sums[source, token] = sums.get((source, token), 0) + rows[place].float()
        return {where: total.to(rows.dtype) for where, total in sums.items()}

    def _local_weights(self, weights: T) -> dict[tuple[int, int, int], float]:
        first = self.group.comm.rank * self.group.num_local
        if self.layout == Layout.EXPERT_MAJOR:
            demand(weights.dim() == 1, 9, f"weights {tuple(weights.shape)}")
            return {(s, t, first + e): weights[place].item() for place, (s, t, e) in enumerate(self.slots)}
        demand(weights.dim() == 2 and weights.shape[1] == self.num_topk, 9, f"weights {tuple(weights.shape)}")
        return {
            (source, token, first + local): weights[place, column].item()
            for place, (source, token) in enumerate(self.tokens)
            for column, local in enumerate(self._locals(source, token))
        }

    def _bring_weights_home(self, brought: list[dict[tuple[int, int, int], float]], out: T) -> None:
        demand(out.shape == self.ids.shape and out.dtype == torch.float32, 9, f"weights home {tuple(out.shape)}")
        me = self.group.comm.rank
        home = {key: value for part in brought for key, value in part.items() if key[0] == me}
        for token, row in enumerate(self.ids.tolist()):
            for k, expert in enumerate(row):
                dropped = 0.0 if self._drops else None
                out[token, k] = home.get((me, token, expert), dropped) if expert >= 0 else 0.0


class LowLatencyHandle(Handle):
    """`slots_of[source]`: the token in each filled slot."""

    finish: Callable[[], None] | None = None

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: Any) -> None:
        demand(self.open, 11, "update of a destroyed handle")
        demand(layout_info is None, 14, "layout_info in an update")
        demand(self.group.under_way is not self, 13, "an update of ids that a send under way will read again")
        ids, config = topk_idx.buffer, self.group.config
        demand(ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64), 6, f"ids {ids.dtype} {tuple(ids.shape)}")
        demand(ids.shape[0] <= config.max_dispatch_tokens_per_rank, 6, f"{ids.shape[0]} tokens")
        demand(bool((ids < config.num_experts).all()), 6, f"ids up to {ids.max()} of {config.num_experts} experts")
        self.bound, self.ids, self.state = weakref.ref(ids), ids.clone(), "updated"

    def _check_ids(self) -> None:
        ids = self.bound()
        demand(ids is not None, 13, "the ids are gone")
        demand(ids is not None and torch.equal(ids, self.ids), 13, "the ids were changed")

    def _begin(self, descriptors: tuple[Any, ...], finish: Callable[[], None], send_only: int) -> None:
        demand(self.group.under_way is None, 12, "an operation while a send is under way")
        self.alive = [weakref.ref(d) for d in descriptors]
        self.finish, self.group.under_way = finish, self
        if not send_only:
            self.complete(stream=None)

    def complete(self, *, config: int = 0, stream: Any) -> None:
        if self.finish is None:
            return
        demand(all(ref() is not None for ref in self.alive), 13, "descriptors of a send under way are gone")
        self._check_ids()
        finish, self.finish, self.group.under_way = self.finish, None, None
        finish()

    def _check_wide(self, rows: T) -> None:
        c = self.group.config
        demand(rows.shape[-1] % 512 == 0, 14, f"rows of {rows.shape[-1]} elements")
        demand(rows.shape[-1] * rows.element_size() <= c.max_token_bytes, 3, f"rows of {rows.shape[-1]} elements")
        shape = (self.group.comm.size, c.max_dispatch_tokens_per_rank, rows.shape[-1])
        demand(rows.dim() == 2 or tuple(rows.shape) == shape, 14, f"rows {tuple(rows.shape)}, not {shape}")

    def dispatch(
        self, inputs: Any, outputs: Any, *, layout_info: Any = None, config: DispatchConfig, stream: Any
    ) -> None:
        demand(self.open and self.state == "updated", 7, f"dispatch on a handle that is {self.state}")
        demand(config.pass_direction == PassDir.FWD, 14, "a backward pass")
        x, weights = inputs.tokens.buffer, inputs.topk_weights.buffer
        demand(x.dim() == 2 and x.shape[0] == self.ids.shape[0], 14, f"rows {tuple(x.shape)}")
        demand(weights.shape == self.ids.shape and weights.dtype == torch.float32, 14, f"weights {weights.shape}")
        self._check_wide(x)
        self._check_wide(outputs.tokens.buffer)
        shape = (self.group.comm.size, self.group.config.max_dispatch_tokens_per_rank, self.num_topk)
        for name, dtype in (("topk_weights", torch.float32), ("topk_idx", torch.int32)):
            got = getattr(outputs, name).buffer
            demand(tuple(got.shape) == shape and got.dtype == dtype, 14, f"{name} {got.dtype} {tuple(got.shape)}")
        sent = x.clone(), weights.clone(), self.ids
        brought = self.group.comm.exchange(("low-latency dispatch",), sent)
        self._begin((inputs, outputs, layout_info), lambda: self._fill(brought, outputs, layout_info), config.send_only)
        self.state = "dispatched"

    def _fill(self, brought: list[Any], outputs: Any, info: LayoutInfo) -> None:
        first = self.group.comm.rank * self.group.num_local
        outputs.topk_idx.buffer.fill_(-1)
        self.slots_of = []
        for source, (x, weights, ids) in enumerate(brought):
            local = torch.where((ids >= first) & (ids < first + self.group.num_local), ids - first, -1)
            chosen = (local >= 0).any(1).nonzero().flatten()
            tokens = chosen[torch.randperm(len(chosen))]
            self.slots_of.append(tokens.tolist())
            outputs.tokens.buffer[source, : len(tokens)] = x[tokens]
            outputs.topk_weights.buffer[source, : len(tokens)] = weights[tokens]
            outputs.topk_idx.buffer[source, : len(tokens)] = local[tokens].int()
            if info.src_rank_counters is not None:
                info.src_rank_counters.buffer[source] = len(tokens)

    def combine(self, inputs: Any, outputs: Any, *, config: CombineConfig, stream: Any) -> None:
        demand(self.open and self.state == "dispatched" and self.finish is None, 7, f"combine while {self.state}")
        demand(config.pass_direction == PassDir.FWD and inputs.topk_weights is None, 14, "a backward pass, or weights")
        rows, out = inputs.tokens.buffer, outputs.tokens.buffer
        demand(rows.dim() == 3, 14, f"rows {tuple(rows.shape)}")
        self._check_wide(rows)
        demand(tuple(out.shape) == (self.ids.shape[0], rows.shape[2]), 14, f"outputs {tuple(out.shape)}")
        mine = {
            (s, t): rows[s, slot].clone() for s, tokens in enumerate(self.slots_of) for slot, t in enumerate(tokens)
        }
        brought = self.group.comm.exchange(("low-latency combine",), mine)
        self._begin((inputs, outputs), lambda: self._sum_up(brought, out), config.send_only)
        self.state = "combined"

    def _sum_up(self, brought: list[dict[tuple[int, int], T]], out: T) -> None:
        for token in range(out.shape[0]):
            total = torch.zeros(out.shape[1], dtype=torch.float32)
            for partial in brought:
                if (self.group.comm.rank, token) in partial:
                    total += partial[self.group.comm.rank, token]
            out[token] = total.to(out.dtype)


library = SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})
