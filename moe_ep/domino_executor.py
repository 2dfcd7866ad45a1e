"""The executor of a schedule: takes M micro-batches through the pieces of one layer, step by step.

It walks through the very `Schedule` that it is given and makes the waits between streams that are there. It knows what
a layer offers (`Pieces`), not what it is, and neither ranks nor streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .domino_checks import check_group, check_region, check_shape, two_of_shape
from .flights import LayerFlight, MoEAux, Routed, given
from .layer import MoELayer
from .peers import is_early_stop, is_reported
from .pending import Pending
from .replica.lease import Lease
from .schedule import Schedule
from .schedule_steps import Kind, Step
from .tracing import stage_range

Region = Callable[..., Any]  # region(fn, *tensors) runs fn(*tensors), such as torch.utils.checkpoint.checkpoint
Group = tuple[list[Pending], list[MoEAux | None]]


class Pieces(Protocol):
    """What the steps of a layer call; see `DominoLayer`."""

    moe: MoELayer | None
    shared_joins_routed: ClassVar[bool]

    def attention_of(self, micro_batch: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream and norm behind attention."""
        ...

    def shared(self, n: Tensor) -> Tensor | None:
        """What needs no dispatcher."""
        ...


class Executor:
    """One walk of M micro-batches through one layer."""

    def __init__(
        self, layer: Pieces, plan: Schedule, inputs: Sequence[Pending], valid: Sequence[Tensor | None]
    ) -> None:
        self.layer, self.plan, self.valid = layer, plan, valid
        self.joint = getattr(layer.moe, "joint_replicas", False)
        self.counts_cross = layer.moe is not None and layer.moe.dispatcher.early_apart and plan.counts_cross
        self.attention_outside = any(step.key.kind is Kind.ATTENTION for step in plan.steps[: plan.before])
        self.inputs = dict(enumerate(inputs))
        self.x: dict[int, Tensor] = {}
        self.h: dict[int, Tensor] = {}
        self.n: dict[int, Tensor] = {}
        self.base: dict[int, Tensor] = {}
        self.joining: dict[int, Tensor] = {}
        self.leases: dict[int, Lease] = {}
        self.routed: dict[int, Routed] = {}  # where micro-batches are placed together
        self.flights: dict[int, LayerFlight] = {}

    def walk(self, steps: Iterable[Step], *, again: bool = False) -> None:
        """Take the steps in order. `again`: of a region's second pass, whose results nobody sees."""
        for step in steps:
            if again and step.key.kind is Kind.COMBINE:
                continue
            try:
                _DO[step.key.kind](self, step.key.micro_batch)
            except BaseException as err:
                if not is_early_stop(err):
                    self._abandon(err, step)
                raise

    def _abandon(self, err: BaseException, step: Step) -> None:
        """Give back what the micro-batches hold, and let no rank wait for this one."""
        tickets = [flight.ticket for flight in self.flights.values()]
        for ticket in [*tickets, *(pending.ticket for pending in self.inputs.values() if pending.ticket is not None)]:
            ticket.release()
        for lease in self.leases.values():
            lease.release()
        moe, (kind, i) = self.layer.moe, step.key[:2]
        if moe is None:
            return
        tell = moe.dispatcher.raise_everywhere
        if self.counts_cross and kind in (Kind.ROUTE, Kind.PACK) and is_reported(err):
            tell = moe.dispatcher.stop_everywhere  # the others launch more until they read what was announced
        tell(err, f"layer {moe.layer_index}, micro-batch {i} ({kind})")

    def results(self) -> Group:
        """Pending outputs and what the routers said."""
        moe, numbers = self.layer.moe, sorted(self.base)
        if moe is None:
            return [Pending(base=self.base[i]) for i in numbers], [None] * len(numbers)
        return [self._pending(moe, i) for i in numbers], [moe.aux_of(self.flights[i]) for i in numbers]

    def _pending(self, moe: MoELayer, i: int) -> Pending:
        ticket = self.flights[i].ticket
        payload, ticket.payload = ticket.payload, ()  # one owner: FSDP2 may put others in their place
        ticket.waits = None  # the next layer's schedule says whether it waits; without one, whoever resolves it does
        return Pending(
            base=self.base[i],
            in_flight=payload,
            ticket=ticket,
            dispatcher=moe.dispatcher,
            joining=self.joining.get(i),
            lease=getattr(self.flights[i], "lease", None),
        )

    @property
    def _moe(self) -> MoELayer:
        assert self.layer.moe is not None, "a dense layer has no such step"
        return self.layer.moe

    def _named(self, stage: str, i: int) -> AbstractContextManager[Any]:
        moe = self.layer.moe
        return stage_range(stage, None if moe is None else moe.layer_index, i)

    def _where(self, method: str, i: int) -> str:
        return f"{name_of(self.layer)}, micro-batch {i}: {method} of {type(self.layer).__name__}"

    def _resolve(self, i: int) -> None:
        pending = self.inputs.pop(i)
        if pending.ticket is not None:
            pending.ticket.waits = self.plan.links[i]
        self.x[i] = pending.resolve()

    def _attention(self, i: int) -> None:
        if not self.attention_outside:  # else a second pass would find the first one's
            self._lease(i)
        with self._named("attention", i):
            x = self.x.pop(i)
            self.h[i], self.n[i] = two_of_shape(self.layer.attention_of(i, x), x.shape, self._where("attention", i))

    def _route(self, i: int) -> None:
        moe, num, lease = self._moe, len(self.valid), self._lease(i)
        if not self.joint:
            how: dict[str, Any] = dict(waits=self.plan.links[i], num_micro_batches=num)
            self.flights[i] = moe.prepare(self.n[i], self.valid[i], micro_batch=i, **how, **given("lease", lease))
            return
        self.routed[i] = moe.run_router(self.n[i], self.valid[i], micro_batch=i, lease=lease)
        if len(self.routed) == num:
            moe.place([self.routed[each] for each in range(num)])

    def _pack(self, i: int) -> None:
        if self.joint:  # else it came with the route
            waits, num = self.plan.links[i], len(self.valid)
            self.flights[i] = self._moe.pack(self.routed.pop(i), waits=waits, num_micro_batches=num)

    def _lease(self, i: int) -> Lease | None:
        """Of a micro-batch's replicas; opened in front of attention, they come home behind its backward."""
        if getattr(self.layer.moe, "replicas", None) is None:
            return None
        num, key = len(self.valid), 0 if self.joint else i
        if key not in self.leases:
            lease = self._moe.open_replicas(key, num, users=num if self.joint else 1)
            assert lease is not None, "a layer with replicas"
            self.leases[key] = lease
        return self.leases[key]

    def _dispatch(self, i: int) -> None:
        self.flights[i].ticket.counts_cross = self.counts_cross
        self._moe.dispatcher.dispatch(self.flights[i].ticket)

    def _experts(self, i: int) -> None:
        self._moe.compute(self.flights[i], beside_others=len(self.valid) > 1)

    def _combine(self, i: int) -> None:
        self._moe.dispatcher.combine(self.flights[i].ticket)

    def _shared(self, i: int) -> None:
        with self._named("shared", i):
            h, added = self.h.pop(i), self.layer.shared(self.n.pop(i))
            if added is not None:
                check_shape(added, h.shape, self._where("shared", i))
            if added is not None and self.layer.moe is not None and self.layer.shared_joins_routed:
                self.base[i], self.joining[i] = h, added
            else:
                self.base[i] = h if added is None else h + added

    def _inside_another(self, i: int) -> None:
        """What a stage of the dispatcher does by itself: counts (and pack, mostly) in route, read in dispatch."""

    def inside(self) -> Executor:
        """A walk that goes on from here, and leaves this one as it is."""
        other = Executor(self.layer, self.plan, (), self.valid)
        other.x, other.h, other.n = dict(self.x), dict(self.h), dict(self.n)
        return other


_DO: dict[Kind, Callable[[Executor, int], None]] = {
    Kind.RESOLVE: Executor._resolve,
    Kind.ATTENTION: Executor._attention,
    Kind.ROUTE: Executor._route,
    Kind.COUNTS: Executor._inside_another,
    Kind.PACK: Executor._pack,
    Kind.READ: Executor._inside_another,
    Kind.DISPATCH: Executor._dispatch,
    Kind.EXPERTS: Executor._experts,
    Kind.COMBINE: Executor._combine,
    Kind.SHARED: Executor._shared,
}


def execute(
    layer: Pieces,
    plan: Schedule,
    inputs: Sequence[Pending],
    valid: Sequence[Tensor | None],
    region: Region | None,
) -> Group:
    """Run all steps, those behind `plan.before` inside the region, if there is one."""
    start = Executor(layer, plan, inputs, valid)
    start.walk(plan.steps[: plan.before])
    if region is not None:
        return _recomputed(region, start)
    start.walk(plan.steps[plan.before :])
    return start.results()


def _recomputed(region: Region, start: Executor) -> Group:
    """The steps of a region, which calls `body` now and perhaps again in backward."""
    passes, recorded = 0, torch.is_grad_enabled()

    def body(*_: Tensor) -> Group | None:
        nonlocal passes
        passes += 1
        check_region(recorded)
        run, again = start.inside(), passes > 1
        run.walk(start.plan.steps[start.plan.before :], again=again)
        return None if again else run.results()

    returned = region(body, *start.x.values(), *start.h.values(), *start.n.values())
    return check_group(returned, len(start.valid), Pending)


def name_of(layer: Pieces) -> str:
    """For messages."""
    return "a dense layer" if layer.moe is None else f"layer {layer.moe.layer_index}"
