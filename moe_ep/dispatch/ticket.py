"""The ticket of one micro-batch: a small state machine that holds everything one trip of tokens needs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from ..faults import place_of
from ..load import LayoutStats, layout_stats

if TYPE_CHECKING:
    from ..lanes import Lane
    from ..schedule_steps import Link
    from .transfer import Packed


class Stage(enum.IntEnum):
    """The last stage a ticket has been through."""

    NEW = 0
    DISPATCH_PREPROCESS = 1
    DISPATCH = 2
    DISPATCH_POSTPROCESS = 3
    COMBINE_PREPROCESS = 4
    COMBINE = 5
    COMBINE_POSTPROCESS = 6
    RELEASED = 7

    @property
    def label(self) -> str:
        """The method's name."""
        return _LABELS[self]


_LABELS = {stage: stage.name.lower() for stage in Stage}


class Ticket:
    """State of one micro-batch between its six stages. Made by `Dispatcher.dispatch_preprocess`.

    Attributes:
        owner: the dispatcher that made it; no other one takes it.
        layer, micro_batch: for messages, and compared between ranks.
        num_tokens, num_rows: T, and N once the rows are there.
        stage: the last stage passed.
        payload: tensors in flight between two stages. Whoever carries them elsewhere in between (a pending output
            that a framework looks through) puts them back before the next stage.
        state: the back end's own record.
        where: layer and micro-batch, for messages.
        num_micro_batches: how many interleave with this one (itself too), compared between ranks.
        place: layer, micro-batch and num_micro_batches as one int, which ranks compare.
        lane: what the micro-batch borrowed; it goes back when the ticket is done, fails or dies.
        waits: of the waits between streams those that its stages make; None: all.
        packed: of the payload, between two stages.
        counts_cross: the counts of later micro-batches travel before this one's are read.
        recorded: whether gradients were recorded when it was made.
        bad_tokens: int64 [], of the routing: tokens whose logits were not finite; None: not known to be any.
    """

    __slots__ = (
        "__weakref__",
        "_layout_args",
        "_return_lane",
        "bad_tokens",
        "counts_cross",
        "lane",
        "layer",
        "micro_batch",
        "num_micro_batches",
        "num_rows",
        "num_tokens",
        "owner",
        "packed",
        "payload",
        "place",
        "recorded",
        "stage",
        "state",
        "waits",
        "where",
    )  # fmt: skip

    def __init__(
        self,
        layer: int,
        micro_batch: int,
        owner: object = None,
        waits: frozenset[Link] | None = None,
        num_micro_batches: int = 1,
    ) -> None:
        self.owner = owner
        self.layer = layer
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches
        self.where = f"layer {layer}, micro-batch {micro_batch}"
        self.place = place_of(layer, micro_batch, num_micro_batches)
        self.stage = Stage.NEW
        self.num_tokens = 0
        self.num_rows = 0
        self.payload: tuple[Tensor, ...] = ()
        self.state: Any = None
        self.lane: Lane | None = None
        self.packed: Packed | None = None
        self.waits = waits
        self.counts_cross = False
        self.recorded = torch.is_grad_enabled()
        self.bad_tokens: Tensor | None = None
        self._return_lane: Callable[[], Any] | None = None
        self._layout_args: tuple[Any, ...] | None = None

    def expect(self, called: Stage) -> None:
        """Refuse a stage out of order, or one behind which gradients would be lost.

        Raises:
            ProtocolError: names the stage expected, the one called, layer and micro-batch.
        """
        if self.stage is Stage.RELEASED:
            raise ProtocolError(
                f"{self.where}: {called.label} was called on a released ticket; every micro-batch needs a new one "
                "from dispatch_preprocess"
            )
        if called != self.stage + 1:
            raise ProtocolError(
                f"{self.where}: {called.label} was called, but {Stage(self.stage + 1).label} is the next stage "
                f"(last one passed: {self.stage.label})"
            )
        recording = torch.is_grad_enabled()
        if recording != self.recorded:
            now, before = ("", " not") if recording else (" not", "")
            raise ProtocolError(
                f"{self.where}, {called.label}: gradients are{now} recorded, but were{before} when the ticket was "
                "made, so backward would lose them; run all stages of a micro-batch with gradients on, or all with "
                "gradients off, also where an activation checkpoint runs some of them (use_reentrant=False)"
            )

    def lend(self, lane: Lane, give_back: Callable[[], Any]) -> None:
        """Take a lane; `give_back` returns it (at most once)."""
        self.lane, self._return_lane = lane, give_back

    def note_layout(self, *args: Any) -> None:
        """Arguments of `layout_stats`, kept until the ticket is released."""
        self._layout_args = args

    @property
    def is_under_way(self) -> bool:
        """Whether it has a routing and is not released."""
        return self.stage is not Stage.RELEASED and self._layout_args is not None

    @property
    def expert_ids(self) -> Tensor:
        """[T, K], as they were given; until the ticket is released."""
        assert self._layout_args is not None, "no layout"
        ids: Tensor = self._layout_args[0]
        return ids

    def layout_stats(self) -> LayoutStats:
        """What this rank sent, as device tensors (no host sync).

        Raises:
            ProtocolError: the ticket is released.
        """
        if self._layout_args is None:
            raise ProtocolError(f"{self.where}: layout_stats was called on a released ticket; call it before combine")
        return layout_stats(*self._layout_args)

    def release(self) -> None:
        """Let go of every tensor and of the lane. Legal at any stage: an abandoned ticket is no error."""
        self.stage = Stage.RELEASED
        self.payload, self.state, self._layout_args = (), None, None
        if self._return_lane is not None:
            self._return_lane()
        self.lane, self.packed, self._return_lane = None, None, None
