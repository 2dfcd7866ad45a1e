"""The process groups that one alarm watches over: what this rank has started on each, and how more is started."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import Call, CallLog
from .settlement import Started

# starts a call on a group; see `settlement.MakeUp`
StartCall = Callable[..., Started]  # (group, call or None, device[, what to send])


class WatchedGroups:
    """Process groups of the same ranks, numbered from 0.

    Args:
        group: number 0; it is held weakly, as all of them are.
        start_call: how a collective is started.

    Attributes:
        logs: what this rank has started, of each group.
        noted: how many collectives of all groups that is.
        device: where the rows of the last one lay.
        meets_in: number of the group that ranks meet in at the end of a step.
    """

    def __init__(self, group: dist.ProcessGroup, start_call: StartCall) -> None:
        self.logs = [CallLog()]
        self.noted = self.meets_in = 0
        self.device = torch.device("cpu")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._groups, self._numbers = [weakref.ref(group)], {group.group_name: 0}
        self._start_call = start_call

    def __contains__(self, group: dist.ProcessGroup) -> bool:
        number = self._numbers.get(group.group_name)
        return number is not None and self._groups[number]() is group

    def add(self, group: dist.ProcessGroup) -> None:
        """One more, unless it is there."""
        if group in self:
            return
        self._groups.append(weakref.ref(group))
        self._numbers[group.group_name] = len(self.logs)
        self.logs.append(CallLog())

    def meet_in(self, group: dist.ProcessGroup) -> None:
        """Meet in this one, which is among them."""
        self.meets_in = self._numbers[group.group_name]

    def is_gone(self) -> bool:
        """Whether the first group is."""
        return self._groups[0]() is None

    def counts(self) -> list[int]:
        """How many collectives this rank has started, of each group."""
        return [log.count for log in self.logs]

    def note(self, group: dist.ProcessGroup, call: Call, device: torch.device) -> None:
        """A collective is about to start."""
        self.device = device
        self.noted += 1
        self.logs[self._numbers[group.group_name]].add(call)

    def start_noted(self, number: int, call: Call, device: torch.device, sent: Tensor) -> Started:
        """Note a call of this rank's own and start it."""
        group = self._group(number)
        self.note(group, call, device)
        return self._start_call(group, call, device, sent)

    def make_up(self, number: int, call: Call | None) -> Started:
        """See `settlement.MakeUp`."""
        device = self.device
        if call is not None and call.device != device.type:  # this rank has noted nothing yet
            device = torch.device(call.device)
        return self._start_call(self._group(number), call, device)

    def _group(self, number: int) -> dist.ProcessGroup:
        group = self._groups[number]()
        if group is None:
            raise RuntimeError("the process group is gone")
        return group
