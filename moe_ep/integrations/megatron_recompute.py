"""Activation recompute of a Megatron block whose batch goes through it in pieces, with the experts of the first pass.

One region of `DominoLayer.recompute_in` holds all pieces of a layer. Megatron's own checkpoint runs the first pass
without gradients and counts only in the second; here both record them, so the second pass finds random states and the
router's counters as the first one did, leaves them as they are now, and logs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..domino import DominoLayer
from ..recompute import in_second_pass, recompute_context_fn, replayed
from .megatron_limits import selected_modules

L = TypeVar("L", bound=DominoLayer)


def set_recompute(layers: Sequence[L], config: Any) -> list[L]:
    """Have layers of a block recompute what the configuration says; which do, from the router on at least."""
    if config.recompute_granularity == "full":
        chosen = list(layers[: config.recompute_num_layers] if config.recompute_method == "block" else layers)
    else:
        chosen = [layer for layer in layers if layer.moe is not None and "moe" in selected_modules(config)]
    for layer in chosen:
        layer.recompute_in(_region, attention=config.recompute_granularity == "full")
    return chosen


def _region(body: Any, *args: Tensor) -> Any:
    return checkpoint(body, *args, use_reentrant=False, context_fn=_contexts)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    first, second = recompute_context_fn()
    return first, _with_states(second, random.get_cuda_rng_tracker().get_states())


@contextlib.contextmanager
def _with_states(second: AbstractContextManager[None], states: Any) -> Iterator[None]:
    """Megatron's random states as they were in the first pass; torch's checkpoint knows only of torch's own."""
    tracker = random.get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        with second:
            yield
    finally:
        tracker.set_states(now)


class _FirstChoice:
    """What Megatron's routers ask for their top-k in place of a RouterReplay."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """(scores, ids) [T, K]; ids as in the first pass."""

        def choose() -> Tensor:
            wanted = (scores.detach(), topk, num_groups, group_topk)
            if self.given is None:
                return default_compute_topk(*wanted)[1]
            return self.given.get_replay_topk(*wanted, default_compute_topk)[1]

        ids = replayed(choose)
        return scores.gather(1, ids), ids


@contextlib.contextmanager
def first_choice(router: Any) -> Iterator[None]:
    """Around a router inside of a region: it chooses, counts and logs once."""
    given, buffers, number = router.router_replay, dict(router._buffers), router.layer_number
    before = replayed(lambda: {name: None if b is None else b.clone() for name, b in buffers.items()})
    router.router_replay = _FirstChoice(given)
    try:
        if in_second_pass():
            router._buffers.update({name: None if b is None else b.clone() for name, b in before.items()})
            router.layer_number = None  # Megatron logs no losses of such a layer
        yield
    finally:
        router.router_replay, router.layer_number = given, number
        if in_second_pass():
            router._buffers.update(buffers)
