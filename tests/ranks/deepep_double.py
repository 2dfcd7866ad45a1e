"""Doubles of DeepEP's two interfaces for CPU ranks: they move rows over gloo and refuse what breaks a contract.

They show that the adapter keeps the contracts below and that rows, sums and gradients come out right; they say nothing
of speed or the kernels. Of streams they know one thing: a device that lags as far behind the host as it may. What a
call reads must live, unchanged, until somebody waits for the comm stream, and what V1 hands over is poison until then
(`UnderWay`; `LateStream` hangs it on the launches of a dispatcher). A broken contract is an AssertionError here, where
the library hangs, traps or computes something else. Contracts, and where each is written (92fe2de is what the 1.2.1
wheels of November 2025 hold, dd758ca the head of July 2026, both of deepseek-ai/DeepEP):

both
  B1  every call is made by all ranks in one order                      README, "Notes" on barriers; notify_dispatch
  B2  x [T, H] and topk tensors contiguous, weights float32, ids int64  EP_HOST_ASSERTs of dispatch and combine
  B3  combine takes bfloat16 only and applies no weights                SWITCH_TYPES of launch.cuh; combine.cuh
  B4  ids lie in [-1, E); -1 is no selection                            docstring of dispatch
  B5  destroy() needs explicitly_destroy, once, before the group goes   docstring of explicitly_destroy
  B6  what a call got lives and is not changed while kernels read it:   csrc/deep_ep.cpp (csrc/legacy/buffer.hpp),
      the synchronous form keeps nothing, record_stream is left to the    "Wait streams" of intranode_dispatch and
      asynchronous one; V1 reads x, ids and weights, and in combine       intranode_combine: `if (async)` alone; ids
      what came of its handle, V2 x and weights                           behind the counts: intranode::dispatch
  B7  a call that routes has a token; an empty tensor has no address    sgl-project/sglang#25397
V1 `Buffer` (92fe2de)
  V1a the number of SMs is even; a handle fixes it for later calls      set_num_sms; channel_prefix_matrix size check
  V1b layout tensors come from get_dispatch_layout of the same ids      intranode_dispatch
  V1c a cached dispatch takes no topk tensors and returns rows only     Buffer.dispatch
  V1d rows in the order (source rank, token); weights 0 where id is -1  tests/test_intranode.py; intranode.cu
  V1e the buffer holds what the configuration needs                     EP_HOST_ASSERT of num_nvl_bytes
  V1f at most 128 experts per rank, hidden bytes a multiple of 32       notify_dispatch; intranode.cu
V2 `ElasticBuffer` (dd758ca)
  V2a T <= num_max_tokens_per_rank, equal on all ranks                  docstring of EPHandle; EP_HOST_ASSERT
  V2b SMs are given; with a handle the estimate has no num_experts      ElasticBuffer.dispatch
  V2c rows in order of arrival; recv_src_metadata[:, 0] is the source   dispatch_copy_epilogue.cuh
  V2d weights of slots with id -1 arrive as they were                   dispatch_copy_epilogue.cuh
  V2e no expert twice in a token                                        EP_DEVICE_ASSERT of dispatch_copy_epilogue.cuh
  V2f expanded: no ids come back, weights are [rows]; again with a      ElasticBuffer.dispatch
      handle needs do_expand again
  V2g hidden a multiple of 256                                          EP_STATIC_ASSERT of combine.cuh
  V2i the buffer is sized for the calls' top-k: 0 means 32              ElasticBuffer.get_buffer_size_hint
  V2h without a NIC: EP_DISABLE_GIN=1 and allow_hybrid_mode=False       deepseek-ai/DeepEP#629, #630
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

BF16 = torch.bfloat16


def check(holds: bool, contract: str) -> None:
    if not holds:
        raise AssertionError(f"contract {contract} of DeepEP is broken")


class Peers:
    """Exchanges Python values among all ranks and sees that they make the same call (B1)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size, self.calls = group, group.rank(), group.size(), 0

    def exchange(self, call: str, *values: Any) -> list[tuple[Any, ...]]:
        self.calls += 1
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, (call, self.calls, *values), group=self.group)
        check(len({one[:2] for one in everybody}) == 1, f"B1 ({[one[:2] for one in everybody]})")
        return [one[2:] for one in everybody]


def check_rows(x: Tensor, ids: Tensor | None, weights: Tensor | None, num_experts: int) -> None:
    check(x.dim() == 2 and x.is_contiguous(), "B2 (x)")
    check(x.shape[0] > 0, "B7")
    if ids is None or weights is None:
        check(ids is None and weights is None, "B2 (ids without weights)")
        return
    check(ids.dtype == torch.int64 and ids.dim() == 2 and ids.is_contiguous(), "B2 (ids)")
    check(weights.dtype == torch.float32 and weights.is_contiguous() and weights.shape == ids.shape, "B2 (weights)")
    check(x.shape[0] == ids.shape[0], "B2 (tokens)")
    check(bool(((ids >= -1) & (ids < num_experts)).all()), "B4")


def ranks_of(ids: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """bool [T, R]: whether a token goes to a rank."""
    ranks = torch.arange(num_ranks)
    return ((ids[:, :, None] // num_local == ranks) & (ids[:, :, None] >= 0)).any(1)


def sum_parts(parts: list[Tensor]) -> Tensor:
    """float32 in the order given, rounded once."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.to(BF16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


class Read:
    """A tensor that kernels read until the stream is through with the call; nobody keeps it for them."""

    def __init__(self, call: str, name: str, tensor: Tensor) -> None:
        self._what = f"B6 ({name} of {call}"
        self._memory, self._tensor = StorageWeakRef(tensor.untyped_storage()), weakref.ref(tensor)
        self._then = tensor.detach().clone()

    def __call__(self) -> None:
        check(not self._memory.expired(), f"{self._what} was freed while it was read)")
        now = self._tensor()
        same = now is None or torch.equal(bits(now), bits(self._then))
        check(same, f"{self._what} was changed while it was read)")


class Written:
    """A tensor that is handed over before it is written: NaN or -1 until the stream is through with the call."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arrives = tensor, tensor.clone()
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def __call__(self) -> None:
        with torch.no_grad():
            self._tensor.copy_(self._arrives)


class UnderWay:
    """Calls that were issued and are over when somebody waits: a work handle of a launch."""

    def __init__(self, steps: Sequence[Callable[[], None]]) -> None:
        self._steps = steps

    def wait(self) -> None:
        steps, self._steps = self._steps, ()
        for step in steps:
            step()

    def is_completed(self) -> bool:
        return True


class LateStream:
    """A comm stream whose launches end when they are waited for, with the calls of a buffer that they made."""

    def __init__(self, comm: Any, buffer: Resource) -> None:
        self._comm, self._buffer = comm, buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def launch(self, what: str, fn: Callable[[], Any], keep: Sequence[Any] = (), mark: Any = None) -> Any:
        def late() -> Any:
            self._buffer.lags = True
            try:
                results, works = fn()
            finally:
                self._buffer.lags = False
            return results, [*works, self._buffer.under_way()]

        return self._comm.launch(what, late, keep=keep, mark=mark)


class Resource:
    """What both buffers share: destroy (B5), and what their kernels still do (B6).

    `lags`: calls come from a launch on another stream, so somebody has to wait for them.
    """

    lags = False

    def __init__(self, group: dist.ProcessGroup, explicitly_destroy: bool) -> None:
        self.peers, self._explicit, self._destroyed = Peers(group), explicitly_destroy, False
        self._steps: list[Callable[[], None]] = []

    def reads(self, call: str, **tensors: Tensor | None) -> None:
        if self.lags:
            self._steps += [Read(call, name, tensor) for name, tensor in tensors.items() if tensor is not None]

    def writes(self, *tensors: Tensor | None) -> None:
        if self.lags:
            self._steps += [Written(tensor) for tensor in tensors if tensor is not None]

    def under_way(self) -> UnderWay:
        """What was called since it was last asked."""
        steps, self._steps = self._steps, []
        return UnderWay(steps)

    def destroy(self) -> None:
        check(self._explicit and not self._destroyed and dist.is_initialized(), "B5")
        self.peers.exchange("destroy")
        self._destroyed = True

    def use(self) -> None:
        check(not self._destroyed, "B5 (used after destroy)")


class Config:
    def __init__(self, num_sms: int, send: int, recv: int, *_: int) -> None:
        check(num_sms % 2 == 0 and 0 < send < recv, "V1a")
        self.num_sms, self.recv = num_sms, recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        slots = self.num_sms // 2 * num_ranks * self.recv
        return -(-slots * (hidden_bytes + 128 * 16) // 128) * 128


def parts_of(handle: Any) -> dict[str, Tensor]:
    """What V1's handle holds, for `Resource.reads`."""
    names = "sizes", "channels", "recv_channels", "source", "in_rank", "send_head"
    return {f"handle_{name}": tensor for name, tensor in zip(names, handle, strict=True)}


class Buffer(Resource):
    """V1."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        *,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
    ) -> None:
        super().__init__(group, explicitly_destroy)
        check(num_rdma_bytes == 0 and num_nvl_bytes % 128 == 0 and num_nvl_bytes > 0, "V1e")
        self.num_nvl_bytes = num_nvl_bytes
        self.peers.exchange("open", num_nvl_bytes)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        check(new_num_sms % 2 == 0, "V1a")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return {2: Config(Buffer.num_sms, 24, 256), 4: Config(Buffer.num_sms, 6, 256)}[num_ranks]

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return {2: Config(Buffer.num_sms, 10, 256), 4: Config(Buffer.num_sms, 9, 256)}[num_ranks]

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        self.use()
        check(topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64, "B2 (ids)")
        size = self.peers.size
        in_rank = ranks_of(topk_idx, num_experts // size, size)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def _check_size(self, config: Config, x: Tensor) -> None:
        needed = config.num_sms // 2 * self.peers.size * config.recv * x.shape[1] * x.element_size()
        check(needed <= self.num_nvl_bytes, "V1e")
        check(x.shape[1] * x.element_size() % 32 == 0, "V1f")

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        config: Config | None = None,
    ) -> tuple[Any, ...]:
        self.use()
        check(config is not None, "V1a (the class's number would be used)")
        assert config is not None
        self._check_size(config, x)
        rank = self.peers.rank
        if handle is not None:
            check(topk_idx is None and topk_weights is None, "V1c")
            in_rank, channels = handle[4], handle[1].shape[1]
            check(channels == config.num_sms // 2, "V1a (another number of SMs than the handle's)")
            check_rows(x, None, None, 0)
            check(in_rank.shape[0] == x.shape[0], "V1c (rows)")
            got = self.peers.exchange("cached dispatch", x[in_rank.any(1)], in_rank[in_rank.any(1)])
            rows = torch.cat([rows_[mask[:, rank]] for rows_, mask in got])
            check(rows.shape[0] == handle[3].shape[0], "V1c")
            self.reads("cached dispatch", x=x, **parts_of(handle))
            self.writes(rows)
            return rows, None, None, None, None, None
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None
        num_experts = num_tokens_per_expert.numel()
        check_rows(x, topk_idx, topk_weights, num_experts)
        layout = self.get_dispatch_layout(topk_idx, num_experts)
        given = num_tokens_per_rank, None, num_tokens_per_expert, is_token_in_rank
        check(all(a is None or torch.equal(a, b) for a, b in zip(given, layout, strict=False)), "V1b")
        num_local = num_experts // self.peers.size
        check(num_local <= 128, "V1f")
        return self._send(x, topk_idx, topk_weights, is_token_in_rank, num_local, config)

    def _send(
        self, x: Tensor, ids: Tensor, weights: Tensor, in_rank: Tensor, num_local: int, config: Config
    ) -> tuple[Any, ...]:
        rank, channels = self.peers.rank, config.num_sms // 2
        got = self.peers.exchange("dispatch", x, ids, weights, in_rank, config.num_sms)
        check(len({one[-1] for one in got}) == 1, "V1a (ranks use different numbers of SMs)")
        rows = torch.cat([one[0][one[3][:, rank]] for one in got])
        local = torch.cat([one[1][one[3][:, rank]] for one in got]) - rank * num_local
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        sent = torch.cat([one[2][one[3][:, rank]] for one in got])
        recv_weights = torch.where(local >= 0, sent, 0.0)
        source = torch.cat([one[3][:, rank].nonzero()[:, 0] for one in got]).int()
        sizes = torch.tensor([one[3].sum(0).tolist() for one in got]).cumsum(0).int()
        empty = torch.zeros(self.peers.size, channels, dtype=torch.int32)
        counts = torch.bincount(local[local >= 0], minlength=num_local).tolist()
        handle = (sizes, empty, empty.clone(), source, in_rank, torch.zeros_like(in_rank, dtype=torch.int32))
        self.reads("dispatch", x=x, ids=ids, weights=weights, in_rank=in_rank)
        self.writes(rows, local, recv_weights)
        return rows, local, recv_weights, counts, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, config: Config | None = None
    ) -> tuple[Any, ...]:
        self.use()
        check(config is not None and handle[2].shape[1] == config.num_sms // 2, "V1a")
        assert config is not None
        self._check_size(config, x)
        check(x.dim() == 2 and x.is_contiguous() and x.shape[0] == handle[3].shape[0], "B2 (combine)")
        check(x.dtype == BF16, "B3")
        weights_fit = topk_weights is None or (
            topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and topk_weights.shape[0] == len(x)
        )
        check(weights_fit, "B2 (weights of combine)")
        sizes, source, in_rank, rank = handle[0], handle[3], handle[4], self.peers.rank
        got = self.peers.exchange("combine", x, topk_weights, sizes, source)
        num_tokens = in_rank.shape[0]
        parts, weight_sum = [], None if topk_weights is None else torch.zeros(num_tokens, topk_weights.shape[1])
        for peer, (rows, weights, peer_sizes, tokens) in enumerate(got):
            low = 0 if rank == 0 else int(peer_sizes[rank - 1, peer])
            mine = slice(low, int(peer_sizes[rank, peer]))
            part = torch.zeros(num_tokens, x.shape[1], dtype=BF16)
            part[tokens[mine].long()] = rows[mine]
            parts.append(part)
            if weight_sum is not None:
                weight_sum[tokens[mine].long()] += weights[mine]
        total = sum_parts(parts)
        self.reads("combine", x=x, weights=topk_weights, **parts_of(handle))
        self.writes(total, weight_sum)
        return total, weight_sum, None


class EPHandle(SimpleNamespace):
    """V2's handle, an object."""


class ElasticBuffer(Resource):
    """V2. The order of arrival is drawn anew in each call."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        allow_hybrid_mode: bool = True,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group, explicitly_destroy)
        check(os.environ.get("EP_DISABLE_GIN") == "1" and not allow_hybrid_mode, "V2h")
        check(hidden % 256 == 0, "V2g")
        check(num_topk > 0, "V2i")
        sizes = num_max_tokens_per_rank, hidden, num_topk
        check(len(set(self.peers.exchange("open", *sizes))) == 1, "V2a")
        self.max_tokens, self.hidden, self.num_topk = sizes
        self.arrival = torch.Generator().manual_seed(self.peers.rank)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup, num_max_tokens_per_rank: int, hidden: int, num_topk: int, allow_hybrid_mode: bool
    ) -> int:
        size = group.size() * num_max_tokens_per_rank * (2 * hidden + 12 * num_topk)
        return -(-size // (2 << 20)) * (2 << 20)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_sms: int = 0,
        handle: Any = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Any, ...]:
        self.use()
        check(num_sms > 0, "V2b")
        check(x.shape[1] == self.hidden, "V2g")
        if handle is not None:
            check(topk_idx is None and not do_cpu_sync and do_expand == handle.do_expand, "V2f")
            return self._again(x, handle)
        assert topk_idx is not None and topk_weights is not None and num_experts is not None
        bound = num_max_tokens_per_rank or self.max_tokens
        check(x.shape[0] <= bound and bound <= self.max_tokens, "V2a")
        check_rows(x, topk_idx, topk_weights, num_experts)
        check(topk_idx.shape[1] <= self.num_topk, "V2i")
        ordered = topk_idx.sort(1).values
        check(not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(), "V2e")
        ids = topk_idx.clone() if do_handle_copy else topk_idx
        self.reads("dispatch", x=x, weights=topk_weights, ids=ids)
        return self._send(x, ids, topk_weights, num_experts, bound, num_sms, do_expand)

    def _send(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, bound: int, num_sms: int, expand: bool
    ) -> tuple[Any, ...]:
        size, rank = self.peers.size, self.peers.rank
        num_local, top_k = num_experts // size, ids.shape[1]
        got = self.peers.exchange("dispatch", x, ids, weights, (bound, num_experts, num_sms, expand))
        check(len({one[3] for one in got}) == 1, "V2a")
        masks = [ranks_of(one[1], num_local, size)[:, rank] for one in got]
        source = torch.cat([peer * bound + mask.nonzero()[:, 0] for peer, mask in enumerate(masks)])
        order = torch.cat([self._arrive(int(mask.sum())) + low for mask, low in zip(masks, starts(masks), strict=True)])
        rows = torch.cat([one[0][mask] for one, mask in zip(got, masks, strict=True)])[order]
        local = torch.cat([one[1][mask] for one, mask in zip(got, masks, strict=True)])[order] - rank * num_local
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        raw = torch.cat([one[2][mask] for one, mask in zip(got, masks, strict=True)])[order]  # V2d
        counts = torch.bincount(local[local >= 0], minlength=num_local)
        metadata = torch.full((len(rows), 2 + top_k), -(2**30), dtype=torch.int32)
        metadata[:, 0] = source[order].int()
        handle = EPHandle(
            do_expand=expand, num_experts=num_experts, num_max_tokens_per_rank=bound, num_sms=num_sms, topk_idx=ids,
            ids_then=ids.clone(), num_recv_tokens_per_expert_list=counts.tolist(), recv_src_metadata=metadata,
            num_unaligned_recv_tokens_per_expert=counts.int(), psum_num_recv_tokens_per_scaleup_rank=None,
        )  # fmt: skip
        if not expand:
            return rows, local, raw, handle, None
        metadata[:, 2:] = self._slots(local, counts)
        return self._expand(rows, metadata), None, self._expand_weights(raw, metadata), handle, None

    def _arrive(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.arrival)

    def _slots(self, local: Tensor, counts: Tensor) -> Tensor:
        """A free row of its expert for each route, in order of arrival."""
        following = (counts.cumsum(0) - counts).tolist()
        slots = torch.full(local.shape, -1, dtype=torch.int32)
        for row in self._arrive(len(local)).tolist():
            for k, expert in enumerate(local[row].tolist()):
                if expert >= 0:
                    slots[row, k] = following[expert]
                    following[expert] += 1
        return slots

    @staticmethod
    def _expand(rows: Tensor, metadata: Tensor) -> Tensor:
        slots = metadata[:, 2:].long()
        out = torch.full((int((slots >= 0).sum()), rows.shape[1]), float("nan"), dtype=rows.dtype)
        for k in range(slots.shape[1]):
            there = slots[:, k] >= 0
            out[slots[there, k]] = rows[there]
        return out

    @staticmethod
    def _expand_weights(weights: Tensor, metadata: Tensor) -> Tensor:
        slots = metadata[:, 2:].long()
        out = torch.full((int((slots >= 0).sum()),), float("nan"))
        out[slots[slots >= 0]] = weights[slots >= 0]
        return out

    def _again(self, x: Tensor, handle: Any) -> tuple[Any, ...]:
        check_rows(x, None, None, 0)
        check(torch.equal(handle.topk_idx, handle.ids_then), "B6 (ids of a handle changed)")
        check(x.shape[0] == handle.topk_idx.shape[0], "V2f (rows)")
        self.reads("cached dispatch", x=x, ids=handle.topk_idx, metadata=handle.recv_src_metadata)
        got = self.peers.exchange("cached dispatch", x)
        source, bound = handle.recv_src_metadata[:, 0].long(), handle.num_max_tokens_per_rank
        rows = torch.empty(len(source), x.shape[1], dtype=x.dtype)
        for peer, (peer_x,) in enumerate(got):
            mine = source // bound == peer
            rows[mine] = peer_x[source[mine] % bound]
        return (self._expand(rows, handle.recv_src_metadata) if handle.do_expand else rows), None, None, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, num_sms: int = 0
    ) -> tuple[Tensor, Tensor | None, None]:
        self.use()
        check(num_sms in (0, handle.num_sms), "V2b")
        check(x.dim() == 2 and x.is_contiguous(), "B2 (combine)")
        check(x.dtype == BF16, "B3")
        metadata, top_k = handle.recv_src_metadata, handle.topk_idx.shape[1]
        num_rows = sum(handle.num_recv_tokens_per_expert_list) if handle.do_expand else len(metadata)
        check(x.shape[0] == num_rows, "V2f (rows of combine)")
        if topk_weights is not None:
            shape = (num_rows,) if handle.do_expand else (num_rows, top_k)
            check(topk_weights.shape == shape and topk_weights.is_contiguous(), "V2f (weights of combine)")
        # x and weights may go at once where they were made on the comm stream, as the adapter's are: its memory is
        # handed out in the stream's order
        self.reads("combine", ids=handle.topk_idx, metadata=metadata)
        rows, weights = self._reduce(x, topk_weights, handle)
        got = self.peers.exchange("combine", rows, weights, metadata[:, 0])
        bound, rank, num_tokens = handle.num_max_tokens_per_rank, self.peers.rank, handle.topk_idx.shape[0]
        owner = handle.topk_idx // (handle.num_experts // self.peers.size)
        parts, out = [], None if topk_weights is None else torch.zeros(num_tokens, top_k)
        for peer, (peer_rows, peer_weights, source) in enumerate(got):
            mine = source // bound == rank
            token = (source[mine] % bound).long()
            part = torch.zeros(num_tokens, x.shape[1], dtype=BF16)
            part[token] = peer_rows[mine]
            parts.append(part)
            if out is not None:
                full = torch.zeros(num_tokens, top_k)
                full[token] = peer_weights[mine]
                out = torch.where((owner == peer) & (handle.topk_idx >= 0), full, out)
        return sum_parts(parts), out, None

    def _reduce(self, x: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Expanded: a token's local rows summed in float32 and rounded, its weights gathered."""
        if not handle.do_expand:
            return x, weights
        slots = handle.recv_src_metadata[:, 2:].long()
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        total = sum_parts([padded[torch.where(slots[:, k] >= 0, slots[:, k], -1)] for k in range(slots.shape[1])])
        if weights is None:
            return total, None
        padded_weights = torch.cat([weights, weights.new_zeros(1)])
        return total, padded_weights[torch.where(slots >= 0, slots, -1)]


def starts(masks: list[Tensor]) -> list[int]:
    sizes = [int(mask.sum()) for mask in masks]
    return [sum(sizes[:i]) for i in range(len(sizes))]


V1 = SimpleNamespace(Buffer=Buffer, Config=Config, topk_idx_t=torch.int64)
V2 = SimpleNamespace(ElasticBuffer=ElasticBuffer, EPHandle=EPHandle, topk_idx_t=torch.int64)
