"""Domino: a layer takes M micro-batches together, so that communication of one hides behind computation of the others.

`moe_ep.schedule` says in which order and what waits for what; the executor here walks through that very object, and of
the waits between streams it makes those that are there. A layer does not wait for its last communications: it returns
`Pending` outputs, and whoever needs one resolves it. Between layers that is the next layer, right before its attention,
so the last combine of a layer hides behind the next layer's first attention.

    stack = DominoStack(layers)                     # DominoLayers: attention, moe, shared
    ys, auxes = stack([x0, x1])                     # M = 2; M = 1 is the plain model
    (loss(ys[0]) + loss(ys[1])).backward()          # one backward for all, or nothing interleaves in backward

All ranks of an expert-parallel group pass the same M. Values do not depend on M: outputs, losses, counters and each
micro-batch's own gradients are those of M = 1, bit for bit where the operations are deterministic. What is summed over
micro-batches is summed in a fixed order: autograd reaches the last micro-batch first, so a parameter used once in each
gets ((g[M-1] + g[M-2]) + ... + g[0]), and that is added to what its `.grad` held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .dispatch.base import Dispatcher
from .dispatch.ticket import Stage, Ticket
from .dispatch.waits import ALL_WAITS
from .domino_checks import check_group, check_listed, check_region, check_shape, check_taken_apart, two_of_shape
from .eager import eager
from .errors import InputError, ProtocolError, RecipeError
from .flights import LayerFlight, MoEAux, Routed, given
from .layer import MoELayer, check_layer_indices, moe_layers
from .peers import is_early_stop, is_reported
from .replica.lease import Lease
from .schedule import Kind, Link, Schedule, Step, schedule
from .tracing import stage_range

Region = Callable[..., Any]  # region(fn, *tensors) runs fn(*tensors), such as torch.utils.checkpoint.checkpoint


@dataclass(slots=True, kw_only=True)
class Pending:
    """An output of a layer that may still be under way.

    A dataclass of tensors, because FSDP2 has to find and replace the tensors that a module takes and returns: what
    `resolve` works on are the tensors found here, not those that the ticket was last seen with.

    Attributes:
        base: [..., H], what is here already: the residual stream, plus shared experts or MLP.
        in_flight: the tensors of the routed experts' results on their way; not valid before `resolve`.
        ticket, dispatcher: of the micro-batch; None where nothing is under way.
        joining: [..., H], what is added to the routed experts' result before `base` is; None: nothing.
        lease: of the layer's replicas, if any: their weights set off in backward where this is resolved.
    """

    base: Tensor
    in_flight: tuple[Tensor, ...] = ()
    ticket: Ticket | None = None
    dispatcher: Dispatcher | None = None
    joining: Tensor | None = None
    lease: Lease | None = None

    def resolve(self) -> Tensor:
        """Wait for the combine and add it up: the layer's output [..., H]. Once for each pending output.

        Raises:
            ProtocolError: it was resolved before; so it seems, too, in the second pass of an activation checkpoint
                around it.
            PeerError: the combine failed on the way.
        """
        if self.ticket is None or self.dispatcher is None:
            return self.base
        if self.ticket.stage is Stage.RELEASED:
            raise ProtocolError(
                f"{self.ticket.where}: its pending output was resolved before; resolve each one once, and outside of "
                "activation checkpoints (DominoLayer.recompute_in checkpoints a layer)"
            )
        self.ticket.payload, self.in_flight = self.in_flight, ()  # nobody else needs these rows again
        with stage_range("resolve", self.ticket.layer, self.ticket.micro_batch):
            routed = self.dispatcher.combine_postprocess(self.ticket).view(self.base.shape)
            lease, self.lease = self.lease, None
            routed = routed if lease is None else lease.bring(routed)
            return self.base + (routed if self.joining is None else routed + self.joining)


pytree.register_dataclass(Pending)  # for FSDP2 before torch 2.13, see Routing

Group = tuple[list[Pending], list[MoEAux | None]]


class DominoLayer(nn.Module):
    """A decoder layer in the pieces that can be interleaved. Derive from it, set `moe`, write the two methods.

    Called with a tensor it is the plain layer: (x [..., H], valid) to (y [..., H], MoEAux or None). Called with M
    pending outputs it gives M pending outputs and M MoEAux. Both are one code path. Hooks on the module's call, such as
    FSDP2's, see either. `moe` is taken apart: only the calls of its router, experts and shared experts see hooks.
    """

    moe: MoELayer | None
    # which sum is rounded first: False: (residual stream + shared) + routed; True: residual stream + (routed + shared)
    shared_joins_routed: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._region: Region | None = None
        self._outside: tuple[Kind, ...] = ()

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(h, n), shaped as x: the residual stream after attention, and its norm, which experts and MLP read."""
        raise NotImplementedError(f"{type(self).__name__} must define attention")

    def attention_of(self, micro_batch: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """`attention`, told which of the M micro-batches x is; override it where a mask or the like belongs to each."""
        return self.attention(x)

    def shared(self, n: Tensor) -> Tensor | None:
        """What needs no dispatcher: output of the MLP or of the shared experts, [..., H]; None where there is none."""
        return None if self.moe is None else self.moe.run_shared(n)

    def recompute_in(self, region: Region | None, *, attention: bool = True) -> None:
        """Run the layer's computation inside `region`, which may run it again in backward.

        The routes must be replayed: `functools.partial(checkpoint, use_reentrant=False,
        context_fn=recompute_context_fn)`. What is pending is resolved outside; all M of them first, since one region
        holds all M micro-batches. The second pass dispatches again, but combines nothing: nobody needs that.

        Args:
            region: None: nothing is recomputed.
            attention: False: only from the router on.

        Raises:
            RecipeError: `region` cannot be called; at the layer's call: it records no gradients where the caller does
                (use_reentrant=True), or returns something else than what it was given to run.
        """
        if region is not None and not callable(region):
            raise RecipeError(
                f"region must be a function of a function and tensors, or None, got {type(region).__name__}; pass "
                "moe_ep.recompute_region"
            )
        self._region = region
        self._outside = () if region is None else (Kind.RESOLVE,) if attention else (Kind.RESOLVE, Kind.ATTENTION)

    @overload
    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, MoEAux | None]: ...

    @overload
    def forward(self, x: Sequence[Pending], valid: Sequence[Tensor | None] | None = None) -> Group: ...

    def forward(self, x: Any, valid: Any = None) -> Any:
        """See the class. `valid` bool [...] (for each micro-batch): tokens with False visit no routed expert."""
        try:
            if isinstance(x, Tensor):
                (pending,), (aux,) = self._run([Pending(base=x)], [valid])
                return pending.resolve(), aux
            check_listed(x, valid, Pending)
            return self._run(list(x), [None] * len(x) if valid is None else list(valid))
        except BaseException as err:
            _tell(err, [self], self._name())
            raise

    def _run(self, inputs: list[Pending], valid: list[Tensor | None]) -> Group:
        if self.moe is not None:
            check_taken_apart(self.moe)
            self.moe.dispatcher.check_interleaving(len(inputs))
        plan, links = self._plan(len(inputs), _host_runs_ahead(inputs[0].base))
        crosses = self.moe is not None and self.moe.dispatcher.early_apart and plan.counts_cross
        run = _Run(self, inputs, valid, links, crosses)
        run.walk(plan.steps[: plan.before])
        if self._region is None:
            run.walk(plan.steps[plan.before :])
            return run.results()
        return _recomputed(self._region, run, plan)

    def _name(self) -> str:
        return "a dense layer" if self.moe is None else f"layer {self.moe.layer_index}"

    @eager  # a trace cannot make a schedule again
    def _plan(self, num_micro_batches: int, host_ahead: bool) -> tuple[Schedule, Sequence[frozenset[Link]]]:
        dense = self.moe is None
        joint = getattr(self.moe, "joint_replicas", False)
        plan = schedule(num_micro_batches, dense=dense, outside=self._outside, host_ahead=host_ahead, joint=joint)
        return plan, _links(plan)


class _Run:
    """One walk of M micro-batches through one layer."""

    def __init__(
        self,
        layer: DominoLayer,
        inputs: Sequence[Pending],
        valid: Sequence[Tensor | None],
        links: Sequence[frozenset[Link]],
        counts_cross: bool,
    ) -> None:
        self.layer, self.valid, self.links, self.counts_cross = layer, valid, links, counts_cross
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
        moe = self.layer.moe
        if moe is None:
            return [Pending(base=self.base[i]) for i in sorted(self.base)], [None] * len(self.base)
        pending = [self._pending(moe, i) for i in sorted(self.base)]
        return pending, [moe.aux_of(self.flights[i]) for i in sorted(self.base)]

    def _pending(self, moe: MoELayer, i: int) -> Pending:
        ticket = self.flights[i].ticket
        payload, ticket.payload = ticket.payload, ()  # one owner: FSDP2 may put others in their place
        ticket.waits = None  # the next layer's schedule says whether it waits; without one, whoever resolves it does
        joining = self.joining.get(i)
        lease = getattr(self.flights[i], "lease", None)
        return Pending(
            base=self.base[i],
            in_flight=payload,
            ticket=ticket,
            dispatcher=moe.dispatcher,
            joining=joining,
            lease=lease,
        )

    @property
    def _moe(self) -> MoELayer:
        assert self.layer.moe is not None, "a dense layer has no such step"
        return self.layer.moe

    def _named(self, stage: str, i: int) -> AbstractContextManager[Any]:
        moe = self.layer.moe
        return stage_range(stage, None if moe is None else moe.layer_index, i)

    def _where(self, method: str, i: int) -> str:
        return f"{self.layer._name()}, micro-batch {i}: {method} of {type(self.layer).__name__}"

    def resolve(self, i: int) -> None:
        pending = self.inputs.pop(i)
        if pending.ticket is not None:
            pending.ticket.waits = self.links[i]
        self.x[i] = pending.resolve()

    def attention(self, i: int) -> None:
        if Kind.ATTENTION not in self.layer._outside:  # else a second pass would find the first one's
            self._lease(i)
        with self._named("attention", i):
            x = self.x.pop(i)
            self.h[i], self.n[i] = two_of_shape(self.layer.attention_of(i, x), x.shape, self._where("attention", i))

    def route(self, i: int) -> None:
        moe, num, lease = self._moe, len(self.valid), self._lease(i)
        if not self._joint:
            how: dict[str, Any] = dict(waits=self.links[i], num_micro_batches=num)
            self.flights[i] = moe.prepare(self.n[i], self.valid[i], micro_batch=i, **how, **given("lease", lease))
            return
        self.routed[i] = moe.run_router(self.n[i], self.valid[i], micro_batch=i, lease=lease)
        if len(self.routed) == num:
            moe.place([self.routed[each] for each in range(num)])

    def pack(self, i: int) -> None:
        if self._joint:  # else it came with the route
            self.flights[i] = self._moe.pack(self.routed.pop(i), waits=self.links[i], num_micro_batches=len(self.valid))

    @property
    def _joint(self) -> bool:
        return getattr(self.layer.moe, "joint_replicas", False)

    def _lease(self, i: int) -> Lease | None:
        """Of a micro-batch's replicas; opened in front of attention, they come home behind its backward."""
        if getattr(self.layer.moe, "replicas", None) is None:
            return None
        num, key = len(self.valid), 0 if self._joint else i
        if key not in self.leases:
            lease = self._moe.open_replicas(key, num, users=num if self._joint else 1)
            assert lease is not None, "a layer with replicas"
            self.leases[key] = lease
        return self.leases[key]

    def dispatch(self, i: int) -> None:
        self.flights[i].ticket.counts_cross = self.counts_cross
        self._moe.dispatcher.dispatch(self.flights[i].ticket)

    def experts(self, i: int) -> None:
        self._moe.compute(self.flights[i], beside_others=len(self.valid) > 1)

    def combine(self, i: int) -> None:
        self._moe.dispatcher.combine(self.flights[i].ticket)

    def shared(self, i: int) -> None:
        with self._named("shared", i):
            h, added = self.h.pop(i), self.layer.shared(self.n.pop(i))
            if added is not None:
                check_shape(added, h.shape, self._where("shared", i))
            if added is not None and self.layer.moe is not None and self.layer.shared_joins_routed:
                self.base[i], self.joining[i] = h, added
            else:
                self.base[i] = h if added is None else h + added

    def inside(self) -> _Run:
        """A walk that goes on from here, and leaves this one as it is."""
        other = _Run(self.layer, (), self.valid, self.links, self.counts_cross)
        other.x, other.h, other.n = dict(self.x), dict(self.h), dict(self.n)
        return other


def _host_runs_ahead(x: Tensor) -> bool:
    """Whether what the host issues on x runs later, so that the host may wait while it runs."""
    return x.device.type != "cpu"


def _links(plan: Schedule) -> Sequence[frozenset[Link]]:
    """The waits of each micro-batch: the stages make these and no others."""
    strange = frozenset().union(*plan.links) - ALL_WAITS
    if strange:
        pairs = ", ".join(f"{waits} for {awaited}" for waits, awaited in sorted(strange))
        raise ProtocolError(f"the schedule has waits that no stage makes: {pairs}")
    return plan.links


def _inside_another(run: _Run, i: int) -> None:
    """Steps that a stage of the dispatcher takes by itself: counts (and pack, mostly) in route, read in dispatch."""


_DO: dict[Kind, Callable[[_Run, int], None]] = {
    Kind.RESOLVE: _Run.resolve,
    Kind.ATTENTION: _Run.attention,
    Kind.ROUTE: _Run.route,
    Kind.COUNTS: _inside_another,
    Kind.PACK: _Run.pack,
    Kind.READ: _inside_another,
    Kind.DISPATCH: _Run.dispatch,
    Kind.EXPERTS: _Run.experts,
    Kind.COMBINE: _Run.combine,
    Kind.SHARED: _Run.shared,
}


def _recomputed(region: Region, start: _Run, plan: Schedule) -> Group:
    """The steps of a region, which calls `body` now and perhaps again in backward."""
    passes, recorded = 0, torch.is_grad_enabled()

    def body(*_: Tensor) -> Group | None:
        nonlocal passes
        passes += 1
        check_region(recorded)
        run, again = start.inside(), passes > 1
        run.walk(plan.steps[plan.before :], again=again)
        return None if again else run.results()

    returned = region(body, *start.x.values(), *start.h.values(), *start.n.values())
    return check_group(returned, len(start.valid), Pending)


def launch(
    layers: Iterable[nn.Module], xs: Sequence[Tensor], valid: Sequence[Tensor | None] | None = None
) -> tuple[list[Pending], list[list[MoEAux]]]:
    """Run M micro-batches through DominoLayers. The outputs are pending, so what follows can hide the last combine.

    Args:
        layers: each is called with M pending outputs.
        xs: M tensors [..., H], of any number of tokens each.
        valid: M masks bool [...] or None.

    Returns:
        M pending outputs, and for each micro-batch the MoEAux of every layer with experts.

    Raises:
        InputError: no micro-batch, another number of masks, a tensor in place of a list; pieces of a layer that return
            something else than tensors shaped as their input.
        PeerError: another rank raised; this one's own errors are raised as they are.
    """
    layers = list(layers)
    try:
        check_listed(xs, valid)
    except InputError as err:
        _tell(err, layers, "the inputs of a stack")
        raise
    pending, auxes = [Pending(base=x) for x in xs], [list[MoEAux]() for _ in xs]
    for number, layer in enumerate(layers):
        try:
            pending, said = layer(pending, valid)
        except BaseException as err:
            _tell(err, layers, f"layer {number} of {len(layers)}")
            raise
        for collected, aux in zip(auxes, said, strict=True):
            collected += [] if aux is None else [aux]
    return pending, auxes


def _tell(err: BaseException, layers: Sequence[nn.Module], where: str) -> None:
    """For dense layers, and what a framework does around a layer."""
    found = [moe for layer in layers if isinstance(layer, nn.Module) for moe in moe_layers(layer)]
    for dispatcher in {moe.dispatcher: None for moe in found}:
        dispatcher.raise_everywhere(err, where)


class DominoStack(nn.Module):
    """DominoLayers one after the other: M tensors to M tensors.

    M is known at the call. Say it in the layers' configuration, too (`MoEConfig.num_micro_batches`), and a dispatcher
    that holds fewer micro-batches in flight is refused when the layer is built, not at the first call.

    Args:
        layers: modules with the pieces of `DominoLayer`.

    Raises:
        RecipeError: a module without them, or two layers with one layer_index.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for number, layer in enumerate(self.layers):
            missing = [name for name in ("attention", "shared", "moe") if not hasattr(layer, name)]
            if missing:
                raise RecipeError(
                    f"layer {number} ({type(layer).__name__}) has no {', '.join(missing)}; derive it from DominoLayer"
                )
        check_layer_indices(self)

    def forward(
        self, xs: Sequence[Tensor], valid: Sequence[Tensor | None] | None = None
    ) -> tuple[list[Tensor], list[list[MoEAux]]]:
        """See `launch`; here everything is resolved."""
        pending, auxes = launch(self.layers, xs, valid)
        try:
            return [output.resolve() for output in pending], auxes
        except BaseException as err:
            _tell(err, list(self.layers), "the outputs of a stack")
            raise
