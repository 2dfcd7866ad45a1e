"""The choice of experts as torch ops, and the context with which activation recompute replays that choice.

A router that runs again in backward may choose otherwise (a tie, another GEMM algorithm, dropout before it), and then
row counts differ from those of the first pass. So the first pass keeps its ids (8*T*K bytes a layer and micro-batch)
and the second takes them:

    y = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn)    # or recompute_region(block, x)

Everything that decides an id is inside the op, so a selective checkpointing policy of your own replays as well if it
saves `SAVED_OPS`. The context here is no such policy, because that runs Python for every op inside the region. Where no
policy, tracer or other mode looks at ops, the function inside is called as it is: torch's way to an op in Python takes
the host as long as several launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .errors import ProtocolError
from .ops import router_module
from .routing import NO_ROUTE


def _watched(tensor: Tensor) -> bool:
    """Whether somebody has to see an op for what it is: a tracer, a mode, a subclass of tensors."""
    return torch.compiler.is_compiling() or type(tensor) is not Tensor or torch._C._len_torch_dispatch_stack() > 0


def choose_experts(scores_TE: Tensor, alive_T: Tensor, top_k: int, num_groups: int, *, kernels: bool = False) -> Tensor:
    """Ids of the K/G highest scores inside each of G groups of E/G consecutive experts; the lower id wins a tie.

    Worked example: scores [[.1, .3, .4, .4]], K = 2 gives [[2, 3]] for one group and [[1, 2]] for two.

    Args:
        scores_TE: float32 [T, E], no NaN.
        alive_T: bool [T]; the other tokens get -1 in every column.
        top_k: K.
        num_groups: G, divides E and K. Columns g*K/G to (g+1)*K/G belong to group g, inside it by falling score.
        kernels: let the CUDA kernels do it where the scores are on a GPU: the same ids.

    Returns:
        int64 [T, K], distinct inside a token.
    """
    if _watched(scores_TE):
        return _choose_op(scores_TE, alive_T, top_k, num_groups)
    if kernels and scores_TE.is_cuda and scores_TE.shape[1] <= router_module().MAX_EXPERTS:
        ids: Tensor = router_module().top_experts(scores_TE, alive_T, top_k, num_groups)
        return ids
    return _choose_experts(scores_TE, alive_T, top_k, num_groups)


def _choose_experts(scores_TE: Tensor, alive_T: Tensor, top_k: int, num_groups: int) -> Tensor:
    num_tokens, num_experts = scores_TE.shape
    size = num_experts // num_groups
    # a stable sort, because torch.topk does not say which of two equal values it takes, and CPU and CUDA differ;
    # + 0.0 turns -0.0 into 0.0
    grouped = (scores_TE + 0.0).view(num_tokens, num_groups, size)
    chosen = grouped.sort(dim=-1, descending=True, stable=True).indices[..., : top_k // num_groups]
    if num_groups > 1:
        chosen = chosen + torch.arange(0, num_experts, size, device=scores_TE.device)[:, None]
    ids = chosen.reshape(num_tokens, top_k)
    return ids.masked_fill(~alive_T[:, None], NO_ROUTE)


_choose_op = torch.library.custom_op(
    "moe_ep::choose_experts",
    _choose_experts,
    mutates_args=(),
    schema="(Tensor scores_TE, Tensor alive_T, int top_k, int num_groups) -> Tensor",
)


@_choose_op.register_fake
def _(scores_TE: Tensor, alive_T: Tensor, top_k: int, num_groups: int) -> Tensor:
    return scores_TE.new_empty((scores_TE.shape[0], top_k), dtype=torch.int64)


def even_experts(alive_T: Tensor, top_k: int, num_experts: int, rank: int, num_ranks: int) -> Tensor:
    """Ids of forced balance: n alive tokens load every expert, and every block of E/R experts for every R, evenly.

    The n*K routes are the points (i + rank/R) * E/(n*K) for i = k*n + t, rounded down. Evenly spaced points put the
    same number, give or take one, into equal intervals, whatever their number, so loads differ by at most one route.
    Two columns of a token are E/K >= 1 apart, so its ids are distinct, and column k stays inside the k-th K-th of the
    experts, as a grouped router promises. The points of R ranks with equal n interleave: their sum is even, too.
    (Spacing a token's experts by E//K and shifting by token leaves ranks idle whose block is narrower than that
    spacing: sgl-project/sglang#37741.)

    Worked example: n = 3, K = 2, E = 4, one rank: points 0, 2/3, 4/3 | 2, 8/3, 10/3, ids [[0, 2], [0, 2], [1, 3]].

    Args:
        alive_T: bool [T]; the other tokens get -1 in every column.
        top_k: K.
        num_experts: E.
        rank: which of the interleaved patterns, in [0, num_ranks).
        num_ranks: R ranks that draw one pattern each; (0, 1) where they are not to be interleaved.

    Returns:
        int64 [T, K].
    """
    even = _even_op if _watched(alive_T) else _even_experts
    return even(alive_T, top_k, num_experts, rank, num_ranks)


def _even_experts(alive_T: Tensor, top_k: int, num_experts: int, rank: int, num_ranks: int) -> Tensor:
    num_alive = alive_T.sum()
    place_T = alive_T.cumsum(0) - 1
    columns = torch.arange(top_k, device=alive_T.device)
    point = (columns * num_alive + place_T[:, None]) * num_ranks + rank
    ids = point * num_experts // (num_alive * top_k * num_ranks).clamp_min(1)
    return ids.masked_fill(~alive_T[:, None], NO_ROUTE)


_even_op = torch.library.custom_op(
    "moe_ep::even_experts",
    _even_experts,
    mutates_args=(),
    schema="(Tensor alive_T, int top_k, int num_experts, int rank, int num_ranks) -> Tensor",
)


@_even_op.register_fake
def _(alive_T: Tensor, top_k: int, num_experts: int, rank: int, num_ranks: int) -> Tensor:
    return alive_T.new_empty((alive_T.shape[0], top_k), dtype=torch.int64)


SAVED_OPS = (torch.ops.moe_ep.choose_experts.default, torch.ops.moe_ep.even_experts.default)


C = TypeVar("C")


class _Active(threading.local):
    """Passes through checkpointed regions that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []


_active = _Active()


class _Pass(AbstractContextManager[None]):
    """One pass through a region: the first one fills `kept`, a replay reads it from the start."""

    def __init__(self, kept: list[Any], replay: bool) -> None:
        self.kept, self.replay = kept, replay
        self.place = 0

    def __enter__(self) -> None:
        self.place = 0
        _active.passes.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _active.passes.remove(self)

    def next(self) -> Any:
        if self.place == len(self.kept):
            raise ProtocolError(
                f"recompute asks for choice {self.place + 1} of experts, the first pass made {len(self.kept)}; "
                "a checkpointed region must run the same routers in both passes"
            )
        self.place += 1
        return self.kept[self.place - 1]


def replayed(choose: Callable[[], C]) -> C:
    """What `choose` makes (ids, a plan of replicas), or in recompute what it made in the first pass.

    Regions may be nested: an outer region's replay decides, and every first pass under way keeps it.

    Raises:
        ProtocolError: recompute runs more routers than the first pass did.
    """
    kept = [p.next() for p in _active.passes if p.replay]
    chosen: C = kept[0] if kept else choose()
    for p in _active.passes:
        if not p.replay:
            p.kept.append(chosen)
    return chosen


def in_second_pass() -> bool:
    """Whether this thread computes again what a first pass did, for the sake of its backward."""
    return any(p.replay for p in _active.passes)


def may_run_again() -> bool:
    """Whether this is computed inside of an activation checkpoint, which may compute it again in backward.

    Told by the hooks that a checkpoint puts on saved tensors, whoever made it; other users of such hooks look alike.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def recompute_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint(use_reentrant=False)`: the second pass replays the ids.

    Each call makes its own store, so any number of micro-batches may be in flight; early stop may be on or off.
    Routing weights are computed again, from the second pass's scores at the first pass's ids.
    """
    kept: list[Any] = []
    return _Pass(kept, replay=False), _Pass(kept, replay=True)


def recompute_region(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, computed again in backward with the experts that it chooses now; for `DominoLayer.recompute_in`.

    It is `checkpoint(fn, *args, use_reentrant=False, context_fn=recompute_context_fn)`. Give `checkpoint` itself where
    other options of it are needed, and with it that context: a router that chooses again may choose otherwise.
    """
    return checkpoint(fn, *args, use_reentrant=False, context_fn=recompute_context_fn)
