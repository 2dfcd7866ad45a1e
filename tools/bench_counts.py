"""Which rows experts were handed, by expert of the whole group, also where copies of experts compute some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_ep.expert_input import ExpertInput
from moe_ep.experts import GroupedExperts

from .bench_setting import Place, sum_ranks


class RowCounts:
    """Notes every call of the experts that it watches, in their order.

    Args:
        place: ranks.
        num_experts: E.
    """

    def __init__(self, place: Place, num_experts: int) -> None:
        self.place, self.num_experts = place, num_experts
        self._noted: list[tuple[Tensor, Tensor | None]] = []  # rows of each expert and slot, which expert is in a slot

    def watch(self, experts: GroupedExperts) -> None:
        """Note the calls of these experts from now on."""
        experts.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[ExpertInput], given: dict[str, Any]) -> None:
        held = given["replicas"].plans[0].instances[self.place.rank] if "replicas" in given else None
        self._noted.append((args[0].tokens_per_expert, held))

    def clear(self) -> None:
        """Forget the calls so far."""
        self._noted.clear()

    def take(self, first: int, num_local: int) -> list[Tensor]:
        """Of each call, rows int64 [L] of the experts from `first` on, wherever they were computed; forgets them.

        Collective where copies of experts took part.
        """
        noted, self._noted = self._noted, []
        return [self._rows(*each, first, num_local)[first : first + num_local].cpu() for each in noted]

    def _rows(self, rows: Tensor, held: Tensor | None, first: int, num_local: int) -> Tensor:
        """int64 [E]."""
        ids = torch.arange(first, first + num_local, device=rows.device)
        if held is not None:
            held = held.to(rows.device)
            ids = torch.cat([ids, torch.where(held < 0, self.num_experts, held).long()])
        found = rows.new_zeros(self.num_experts + 1, dtype=torch.int64).index_add_(0, ids, rows.long())
        return found if held is None else sum_ranks(found, self.place)
