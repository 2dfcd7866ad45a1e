"""High-throughput mode of NCCL EP: one group, the handles of all micro-batches in flight, and the three operations.

A group owns the memory through which rows travel and is made once; the operations of all micro-batches go through it
one after the other, on the comm stream, in one order on all ranks. A handle owns the maps of one routing, which
backward needs again, so a micro-batch holds its handle until its graph is gone and the next one then takes it over.
Making a handle allocates memory on this rank and communicates nothing; what is collective is binding a routing to it
(nccl_ep.h: ncclEpInitHandle, ncclEpUpdateHandle). So ranks need not hold equally many handles, and every routing costs
one update on every rank, in a recompute too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import MoEError, ProtocolError, Unavailable, lost_peer
from .nccl_ep_sizes import Sizes
from .watchdog import Watchdog


class Lease:
    """A handle on loan. It goes back when the last holder, a ticket or a node of its graph, is gone."""

    __slots__ = ("__weakref__", "box")

    def __init__(self, box: list[Any]) -> None:
        self.box = box  # of one element, the library's handle, once there is one


class LibraryGroup:
    """A group of the library, its handles, and their end; subclasses add the operations of a mode.

    Args:
        library: the module nccl.ep.
        communicator: of the library's own, for the ranks of the group; the object takes it over.
        sizes: rounded to what the library takes.
        config: the library's GroupConfig.
        watchdog: told of every operation.

    Raises:
        Unavailable: the library refuses.
    """

    def __init__(self, library: Any, communicator: Any, sizes: Sizes, config: Any, watchdog: Watchdog) -> None:
        self.library, self.sizes, self.watchdog = library, sizes, watchdog
        self._communicator = communicator
        self._boxes: list[list[Any]] = []
        self._free: list[list[Any]] = []
        with refusals("a group"):
            self._group: Any = library.Group.create(communicator, config)

    @property
    def num_handles(self) -> int:
        """Handles made so far."""
        return len(self._boxes)

    @property
    def num_free(self) -> int:
        """Handles that nothing holds."""
        return len(self._free)

    def lease(self) -> Lease:
        """A handle for one micro-batch."""
        if not self._free:
            self._free.append([None])
            self._boxes.append(self._free[-1])
        box = self._free.pop()
        lease = Lease(box)
        weakref.finalize(lease, self._free.append, box)
        return lease

    def close(self) -> None:
        """Handles, then the group, then the communicator; every rank calls it, before its process group goes.

        Where an operation has failed, ranks are no longer at one call, and a collective end could wait for ever: the
        communicator is aborted, and the rest is left to the end of the process.
        """
        if self._group is None:
            return
        if self.watchdog.broken:
            self._communicator.abort()
            self._group = self._communicator = None
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for box in self._boxes:
            if box[0] is not None:
                box[0].destroy()
                box[0] = None
        self._group.destroy()
        self._communicator.destroy()
        self._group = self._communicator = None

    def _check_open(self, what: str) -> None:
        if self._group is None:
            raise ProtocolError(f"{what} came after close(); finish every backward before you close the dispatcher")

    @contextlib.contextmanager
    def _operation(self, what: str, device: torch.device) -> Iterator[None]:
        self._check_open(what)
        with self.watchdog.watch(what, device) as one:
            try:
                with refusals(what):
                    yield
            except RuntimeError as err:
                self.watchdog.broken = True
                if isinstance(err, MoEError):
                    raise
                raise lost_peer(self.watchdog.describe(one), err) from err


class Engine(LibraryGroup):
    """High-throughput mode.

    Args:
        library, communicator, sizes, watchdog: see LibraryGroup.
        num_sms: for its kernels; None: the library's default.
        timeout_s: how long a kernel waits for a peer before it gives up.
    """

    def __init__(
        self, library: Any, communicator: Any, sizes: Sizes, num_sms: int | None, timeout_s: float, watchdog: Watchdog
    ) -> None:
        self._layout = library.Layout.FLAT if sizes.flat else library.Layout.EXPERT_MAJOR
        config = library.GroupConfig(
            algorithm=library.Algorithm.HIGH_THROUGHPUT,
            num_experts=sizes.num_experts,
            max_dispatch_tokens_per_rank=sizes.max_tokens,
            max_recv_tokens_per_rank=sizes.budget or 0,
            max_token_bytes=sizes.row_bytes,
            max_num_sms=num_sms or 0,
            timeout_ns=int(timeout_s * 1e9),
            overflow_policy=library.OverflowPolicy.AUTO if sizes.budget is None else library.OverflowPolicy.DROP,
            num_topk=0 if sizes.flat else sizes.top_k,
        )
        super().__init__(library, communicator, sizes, config, watchdog)

    def update(self, lease: Lease, ids_TK: Tensor, what: str) -> Tensor:
        """Bind a routing. Collective.

        Args:
            lease: whose earlier routing is forgotten.
            ids_TK: int64 [T, K], at least one token, contiguous, ids in [-1, E).
            what: for messages.

        Returns:
            int32 [L + 1]: rows for each local expert, and what was received in all: expert rows, or tokens where flat.
        """
        self._check_open(what)
        counts = torch.empty(self.sizes.local_experts + 1, dtype=torch.int32, device=ids_TK.device)
        info = self.library.LayoutInfo(
            expert_counters=self.library.Tensor(counts[:-1]), recv_total_counter=self.library.Tensor(counts[-1:])
        )
        ids, stream = self.library.Tensor(ids_TK), stream_of(ids_TK)
        with self._operation(what, ids_TK.device):
            if lease.box[0] is None:
                config = self.library.HandleConfig()
                lease.box[0] = self._group.create_handle(
                    self._layout, ids, layout_info=info, config=config, stream=stream
                )
            else:
                lease.box[0].update(ids, layout_info=info, stream=stream)
        return counts

    def dispatch(self, lease: Lease, rows: Tensor, weights_TK: Tensor, out: tuple[Tensor, ...], what: str) -> None:
        """Forward: rows [T, H] and weights float32 [T, K] to the experts' ranks. Collective.

        Args:
            lease: with a routing of T tokens.
            rows: contiguous.
            weights_TK: contiguous.
            out: rows [N, H] and weights [N]; where flat, rows [U, H], weights [U, K] and local ids int64 [U, K].
            what: for messages.
        """
        tensor, lib = self.library.Tensor, self.library
        ids = tensor(out[2]) if self.sizes.flat else None
        outputs = lib.DispatchOutputs(tokens=tensor(out[0]), topk_weights=tensor(out[1]), topk_idx=ids)
        info = lib.LayoutInfo(recv_topk_idx_kind=lib.ExpertIdKind.LOCAL) if self.sizes.flat else None
        inputs = lib.DispatchInputs(tokens=tensor(rows), topk_weights=tensor(weights_TK))
        config = lib.DispatchConfig(pass_direction=lib.PassDir.FWD)
        with self._operation(what, rows.device):
            lease.box[0].dispatch(inputs, outputs, layout_info=info, config=config, stream=stream_of(rows))

    def scatter(self, lease: Lease, rows: Tensor, out: Tensor, what: str) -> None:
        """Backward of combine: gradients [T, H] to the ranks that the rows came from, [N, H]. Collective."""
        tensor, lib = self.library.Tensor, self.library
        inputs, outputs = lib.DispatchInputs(tokens=tensor(rows)), lib.DispatchOutputs(tokens=tensor(out))
        config = lib.DispatchConfig(pass_direction=lib.PassDir.BWD)
        with self._operation(what, rows.device):
            lease.box[0].dispatch(inputs, outputs, config=config, stream=stream_of(rows))

    def combine(self, lease: Lease, rows: Tensor, out: Tensor, what: str) -> None:
        """Forward: rows [N, H] home, summed in float32 to [T, H]. Collective."""
        tensor, lib = self.library.Tensor, self.library
        inputs, outputs = lib.CombineInputs(tokens=tensor(rows)), lib.CombineOutputs(tokens=tensor(out))
        config = lib.CombineConfig(pass_direction=lib.PassDir.FWD)
        with self._operation(what, rows.device):
            lease.box[0].combine(inputs, outputs, config=config, stream=stream_of(rows))

    def gather(self, lease: Lease, rows: Tensor, weights: Tensor, out: tuple[Tensor, Tensor], what: str) -> None:
        """Backward of dispatch: gradients of rows and weights home, to [T, H] and float32 [T, K]. Collective."""
        tensor, lib = self.library.Tensor, self.library
        inputs = lib.CombineInputs(tokens=tensor(rows), topk_weights=tensor(weights))
        outputs = lib.CombineOutputs(tokens=tensor(out[0]), topk_weights=tensor(out[1]))
        config = lib.CombineConfig(pass_direction=lib.PassDir.BWD)
        with self._operation(what, rows.device):
            lease.box[0].combine(inputs, outputs, config=config, stream=stream_of(rows))


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn whatever the library raises into an error of ours that says at what."""
    try:
        yield
    except RuntimeError:
        raise  # of torch, or ours
    except Exception as err:
        kind, text = type(err).__name__, (str(err).splitlines() or [""])[0]
        raise Unavailable(
            f"NCCL EP refused {what} ({kind}: {text}); what it printed above says why, and NCCL_DEBUG=WARN says more"
        ) from err


def stream_of(tensor: Tensor) -> Any:
    """The stream that the library is to work on: the current one, which inside a launch is the comm stream."""
    return torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None
