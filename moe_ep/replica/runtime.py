"""Copies of hot experts between router and dispatcher, made for each micro-batch from its own load.

    lease = runtime.open(masters, ...)              before the router, so that gradients come home behind its backward
    moved = runtime.route(lease, [routing])         loads of all ranks -> plan -> reroute; weights are on their way
    y = experts(input, replicas=lease)              masters and slots; in backward weights come again, gradients go home

The router knows E logical experts, the dispatcher P = R(L+S) physical ones. Every rank plans for itself, from loads
that all have, and they compare what they planned before anything is sent. A `Lease` keeps the plan until backward has
been along it; slots are held only while experts run (`lanes.py`), and all layers use the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import MoEConfig
from ..dispatch.base import Dispatcher
from ..dispatch.capabilities import group_serves
from ..errors import InputError, ProtocolError
from ..faults import Fault
from ..load import expert_load, rank_load
from ..recompute import in_second_pass, replayed
from ..routing import NO_ROUTE, Routing
from .checks import copy_bytes
from .device import reroute_on_device
from .exchange import Exchange, check_sums, sums_status
from .lanes import SlotLane, SlotLanes, held_by
from .lease import Lease
from .plan import Plan
from .planning import bounded, make_plans, plan_by_kernels
from .reroute import reroute


class Planned(NamedTuple):
    """What a second pass takes over from the first.

    Attributes:
        plans: of each micro-batch.
        placed: the first of them, as the transport reads it.
        lane: which slots are used.
        trained: whether any rank trains its experts, so that all ranks send gradients home.
    """

    plans: list[Plan]
    placed: Plan
    lane: int
    trained: bool


class ReplicaRuntime:
    """The replicas of all layers of one dispatcher that have experts of one size.

    Args:
        config: of the layers; `config.replica` has S, the planner and the transport.
        dispatcher: of P physical experts.
    """

    def __init__(self, config: MoEConfig, dispatcher: Dispatcher) -> None:
        assert dispatcher.group is not None, "one rank has nobody to copy to"
        self.config, self.dispatcher, self.group = config, dispatcher, dispatcher.group
        self.rank, self.num_ranks, self.slots = dispatcher.rank, dispatcher.num_ranks, config.replica.slots
        self.lane_bytes = self.slots * copy_bytes(config)
        self.exchange = Exchange(self.group, config.num_experts, dispatcher.alarm)
        self._lanes = SlotLanes(config, dispatcher)
        self._sum: Tensor | None = None  # of the last plan, where no host reads it

    def __deepcopy__(self, memo: dict[int, object]) -> ReplicaRuntime:
        """The runtime itself, as with the dispatcher: copies of a layer share its slots."""
        return self

    @property
    def lanes(self) -> list[SlotLane]:
        """Sets of slots that were made so far."""
        return self._lanes.made

    @property
    def host_syncs(self) -> int:
        """Of one micro-batch on a GPU: loads and hashes are read, unless kernels do everything; 0 before first use."""
        return sum(2 for lane in self.lanes[:1] if self._on_host(lane))

    def describe(self) -> str:
        """One line on what runs, for the log."""
        replica = self.config.replica
        joint = ", one placement for the micro-batches that interleave" if replica.joint else ""
        return (
            f"replicas: {self.slots} slot(s) a rank beside its {self.config.num_experts // self.num_ranks} expert(s), "
            f"which the dispatcher counts together, {self.lane_bytes / 2**20:.1f} MiB for each micro-batch in flight, "
            f"planner {replica.planner}{joint}, transport {replica.transport}"
        )

    def open(
        self,
        masters: Sequence[Tensor] | None,
        layer: int,
        micro_batch: int = 0,
        *,
        num_micro_batches: int = 1,
        users: int = 1,
        trained: bool = True,
    ) -> Lease:
        """Begin with the replicas of one micro-batch in one layer.

        Args:
            masters: the experts' parameters; None: not there yet (sharded), so the experts bring them and nothing of
                the copying hides behind other computation.
            layer: for messages, and compared between ranks.
            micro_batch: likewise; the first one of those that share the lease.
            num_micro_batches: how many interleave.
            users: how many share the lease.
            trained: whether this rank's experts ask for gradients; the ranks need not agree.
        """
        return Lease(masters, layer, micro_batch, num_micro_batches, users, trained)

    def check_device(self, device: torch.device) -> None:
        """Refuse what the ranks cannot exchange loads from.

        Raises:
            InputError: the group serves no such device.
        """
        if not group_serves(self.group, device):
            raise InputError(
                f"x is on {device}, but the process group has no back end for it; init_process_group with 'nccl' for "
                "cuda, 'gloo' for cpu"
            )

    def route(self, lease: Lease, routings: Sequence[Routing]) -> list[Routing]:
        """Routings of the lease's micro-batches to physical experts; weight_sync is launched. Collective.

        Raises:
            InputError, NonFiniteError: a fault of this rank's routing (where the host reads it), or another number.
            PeerError: a fault of another rank's, a lost rank, or an exception of another rank in here. PlanError: loads
                that cannot be planned, or plans that differ between ranks; on every rank.
            ProtocolError: no slots are free, the lease has a plan, or the dispatcher was closed.
        """
        try:
            self._check_open(lease.where)
            lease.check_unused(len(routings))
            device = routings[0].expert_ids.device
            planned: Planned = replayed(lambda: self._plan(lease, routings, device))
            lane = self._lanes.at(planned.lane, device)
            lease.begin(planned.plans, planned.placed, lane, second_pass=in_second_pass(), trained=planned.trained)
            return [self._moved(lease, routing, each) for routing, each in zip(routings, planned.plans, strict=True)]
        except BaseException as err:
            lease.release()
            self.dispatcher.raise_everywhere(err, f"{lease.where} (replicas)")
            raise

    def rank_rows(self, moved: Routing) -> Tensor:
        """Rows of this rank's tokens that each rank computes, int64 [R]."""
        return rank_load(expert_load(moved.expert_ids, moved.num_experts), self.num_ranks)

    def copies_held(self, lease: Lease) -> Tensor:
        """Slots of this rank that the plan fills, int64 []."""
        return (lease.plans[0].instances[self.rank] >= 0).sum()

    def announce_failure(self, lease: Lease, device: torch.device | None) -> None:
        """Tell the other ranks, in place of `route`, that this rank fails before it; then raise."""
        device = self.dispatcher.served_device(device)
        if self._on_host(self._lanes.at(0, device)):
            message = self.exchange.failure(device, lease.layer, lease.micro_batch)
            self.exchange.gather(f"exchange of loads of {lease.where}", torch.cat([message] * lease.users))
            return
        # nobody reads anything on the host: take part in all of it, without a token
        ids = torch.full((0, self.config.top_k), NO_ROUTE, device=device)
        empty = Routing(expert_ids=ids, weights=ids.float(), num_experts=self.config.num_experts)
        self.route(lease, [empty] * lease.users)
        lease.release()  # by hand: the error that is to be raised may keep it alive
        self.dispatcher.announce_failure(device, layer=lease.layer, micro_batch=lease.micro_batch)

    def check_returned(self) -> None:
        """Between steps: see that nobody holds slots any more.

        Raises:
            ProtocolError: who does; a micro-batch was routed and its experts never ran.
        """
        who = held_by(self.lanes)
        if who:
            raise ProtocolError(
                f"replica slots were not given back at the end of a step: {who}; run the experts of every micro-batch "
                "that is routed, and backward to its end"
            )

    def close(self) -> None:
        """Free the slots; call it before the process group goes."""
        self._lanes.close()

    # internals

    def _check_open(self, where: str) -> None:
        if self.dispatcher.closed:
            raise ProtocolError(f"{where}: experts were to be copied behind a closed {self.dispatcher.name} dispatcher")

    def _on_host(self, lane: SlotLane) -> bool:
        """Whether plans are made or read on the host, which then checks them there and then."""
        return lane.transport.reads_plan or not self.dispatcher.kernels or self.config.replica.joint

    def _plan(self, lease: Lease, routings: Sequence[Routing], device: torch.device) -> Planned:
        number = self._lanes.free(lease.where, max(lease.num_micro_batches, lease.micro_batch + 1))
        on_host = self._on_host(self._lanes.at(number, device))
        messages = [
            self.exchange.message(
                routing, lease.layer, lease.micro_batch + i, lease.num_micro_batches, trained=lease.trained
            )
            for i, routing in enumerate(routings)
        ]
        what = f"exchange of loads of {lease.where}"
        trained = True  # where no host reads whether anybody does
        if on_host:
            plans, trained = self._on_host_plans(what, lease, messages)
        else:
            plans = [self._device_plan(what, lease, messages[0])]
        placed = plans[0]
        if on_host and device.type != "cpu":  # read once, not at every operation
            placed = dataclasses.replace(placed, instances=placed.instances.cpu())
        return Planned(plans, placed if self.lanes[number].transport.reads_plan else plans[0], number, trained)

    def _on_host_plans(self, what: str, lease: Lease, messages: list[Tensor]) -> tuple[list[Plan], bool]:
        everybody = self.exchange.gather(what, torch.cat(messages))
        read = everybody.cpu()
        for told in self._parts(read, lease):
            self.exchange.check(told, lease.where)
        loads, copies = (
            [part[:, : self.config.num_experts] for part in self._parts(of, lease)] for of in (everybody, read)
        )
        plans = make_plans(self.config.replica, loads, copies, kernels=self.dispatcher.kernels)
        sums = torch.stack([each.checksum() for each in plans])
        compared = self.exchange.gather(f"comparison of plans of {lease.where}", sums)
        for values in compared.cpu().T.tolist():
            check_sums(values, lease.where)
        return plans, any(bool(told[:, self.config.num_experts].any()) for told in self._parts(read, lease))

    def _parts(self, everybody: Tensor, lease: Lease) -> tuple[Tensor, ...]:
        """[R, E+4] of each micro-batch."""
        return everybody.view(self.num_ranks, lease.users, -1).unbind(1)

    def _device_plan(self, what: str, lease: Lease, message: Tensor) -> Plan:
        """No host sync: a plan that differs is found with the next one, and faults of the routing by the dispatcher."""
        before = message.new_zeros(()) if self._sum is None else self._sum
        everybody = self.exchange.gather(what, torch.cat([message, before.view(1)]))
        load, status = bounded(everybody[:, : self.config.num_experts])
        for found in (sums_status(everybody[:, -1]), status):
            self.dispatcher.faults(message.device).note(found, lease.layer, lease.micro_batch)
        made = plan_by_kernels(self.config.replica, load)
        self._sum = made.checksum()
        return made

    def _moved(self, lease: Lease, routing: Routing, made: Plan) -> Routing:
        if not (self.dispatcher.kernels and routing.expert_ids.is_cuda):
            return reroute(routing, made, self.rank)
        moved, wrong = reroute_on_device(routing, made, self.rank)
        status = torch.stack([torch.where(wrong > 0, int(Fault.OTHER_PLAN), 0), torch.full_like(wrong, self.rank)])
        self.dispatcher.faults(wrong.device).note(status, lease.layer, lease.micro_batch)
        return moved
