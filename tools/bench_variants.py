"""The variants of a stack or a step: one batch whole or split, one after the other or interleaved, and its two halves.

    unsplit         all M T tokens as one micro-batch through the plain layers
    split           M micro-batches one after the other, gradients accumulating
    overlapped      M micro-batches interleaved (Domino), one backward for all
    joint           overlapped, with one placement of copies of hot experts for all M, where there are slots for copies
    compute         overlapped without the transfers of rows, see bench_tap
    communication   those transfers alone, back to back

The last two are refused for back ends whose transfers leave more than rows: `direct`, `deepep` and `nccl_ep` learn in
the same kernels where rows lie. Then the bound (`floor_us`) and the share hidden by step times are not there either.
They are left out with slots for copies of experts, whose weights and gradients travel past that tap.

All work on the same tokens. unsplit to split is the price of splitting, split to overlapped the gain of overlapping.
With M = 1 the first three are one and the same, called unsplit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_ep.config import ReplicaConfig

Variant = Literal["unsplit", "split", "overlapped", "joint", "compute", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one case runs.

    Attributes:
        level: "stack" (gradients arrive at the outputs) or "step" (a loss makes them).
        pass_: as in a row.
        num: M.
        variant: see above.
        reserve_sms: for the experts of several micro-batches; None: what the dispatcher declares.
        slots: S, for copies of experts.
    """

    level: str
    pass_: str
    num: int
    variant: Variant
    reserve_sms: int | None = None
    slots: int = 0

    @property
    def whole(self) -> bool:
        """Whether all tokens are one micro-batch."""
        return self.variant == "unsplit" and self.num > 1

    @property
    def interleaved(self) -> bool:
        """Whether the micro-batches go through each layer together."""
        return self.variant not in ("unsplit", "split")

    @property
    def real(self) -> bool:
        """Whether there is a result to check."""
        return self.variant not in ("compute", "communication")

    @property
    def replica(self) -> ReplicaConfig:
        """The copies of experts."""
        return ReplicaConfig(slots=self.slots, joint=self.variant == "joint")


def plans(level: str, pass_: str, num: int, reserves: Sequence[int | None], slots: int = 0) -> list[Plan]:
    """All variants of one M and S, in an order in which each finds what it needs from those before."""

    def plan(variant: Variant, reserve: int | None = 0) -> Plan:
        return Plan(level=level, pass_=pass_, num=num, variant=variant, reserve_sms=reserve, slots=slots)

    halves = [plan("compute"), plan("communication")] if slots == 0 else []
    if num == 1:
        return [plan("unsplit"), *halves]
    interleaved: tuple[Variant, ...] = ("overlapped", "joint") if slots else ("overlapped",)
    return [plan("unsplit"), plan("split"), *(plan(name, r) for r in reserves for name in interleaved), *halves]
