"""What one micro-batch of one layer holds of its replicas, from its plan until its backward is through."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import InputError, ProtocolError
from .flight import Tensors
from .lanes import SlotLane
from .plan import Plan
from .with_replicas import WithReplicas


class Lease:
    """Made by `ReplicaRuntime.open`; the experts take masters and slots from it.

    Attributes:
        layer, micro_batch, num_micro_batches, users, trained: see `ReplicaRuntime.open`.
        where: for messages.
        plans: of each micro-batch that shares the lease, all on one placement.
    """

    def __init__(
        self,
        masters: Sequence[Tensor] | None,
        layer: int,
        micro_batch: int,
        num_micro_batches: int,
        users: int,
        trained: bool = True,
    ) -> None:
        self.layer, self.micro_batch, self.num_micro_batches, self.users = layer, micro_batch, num_micro_batches, users
        self.trained = trained
        together = "" if users == 1 else f" to {micro_batch + users - 1}"
        self.where = f"layer {layer}, micro-batch {micro_batch}{together}"
        self.plans: list[Plan] = []
        self._late: tuple[Plan, SlotLane, bool, bool] | None = None
        self._replicas = None if masters is None else WithReplicas(masters, self.where, users)

    def check_unused(self, num_routings: int) -> None:
        """Refuse a lease that was routed before, or made for another number of micro-batches.

        Raises:
            ProtocolError: it has a plan. InputError: the numbers of both.
        """
        if self.plans:
            raise ProtocolError(f"{self.where}: this lease has a plan already; open one for each layer and micro-batch")
        if num_routings != self.users:
            raise InputError(
                f"{self.where}: {num_routings} routings for a lease that {self.users} micro-batch(es) share; give one "
                "of each, or open the lease with that number of users"
            )

    def begin(self, plans: list[Plan], placed: Plan, lane: SlotLane, *, second_pass: bool, trained: bool) -> None:
        """Take the plans, and send the weights on their way as `placed` says, if they are there.

        Raises:
            ProtocolError: another micro-batch holds the slots.
        """
        self.plans = plans
        if self._replicas is None:
            self._late = placed, lane, second_pass, trained
        else:
            self._replicas.sync(placed, lane, second_pass=second_pass, trained=trained)

    def join(self) -> None:
        """Between launch and end of dispatch: in backward rows then go home before gradients do."""
        if self._replicas is not None:
            self._replicas.join()

    def take(
        self, masters: tuple[Tensor, Tensor], *, fresh_grads: bool = False
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Masters and slots, filled; `masters` are the parameters, in case that they came only now.

        `fresh_grads`: the gradients that masters get in backward are nobody else's, and may be written to.

        Raises:
            ProtocolError: before there is a plan, or once more than there are users.
        """
        if self._replicas is None:
            if self._late is None:
                raise ProtocolError(f"{self.where}: its experts run before it was routed; call ReplicaRuntime.route")
            placed, lane, second_pass, trained = self._late
            self._replicas = WithReplicas(masters, self.where, self.users)
            self._replicas.sync(placed, lane, second_pass=second_pass, trained=trained)
        self._replicas.flight.fresh_grads = fresh_grads
        own, slots = self._replicas.take()
        return _pair(own), _pair(slots)

    def enter(self, x: Tensor) -> Tensor:
        """See WithReplicas."""
        assert self._replicas is not None, "enter before take"
        return self._replicas.enter(x)

    def again(self, y: Tensor) -> Tensor:
        """See WithReplicas."""
        assert self._replicas is not None, "again before take"
        return self._replicas.again(y)

    def bring(self, y: Tensor) -> Tensor:
        """See WithReplicas; where the masters came late, nothing can set off before them."""
        return y if self._replicas is None or self._late is not None else self._replicas.bring(y)

    def release(self) -> None:
        """Give the slots back: nobody goes on with this micro-batch. Legal at any time."""
        if self._replicas is not None:
            self._replicas.flight.release()


def _pair(tensors: Tensors) -> tuple[Tensor, Tensor]:
    gate_up, down = tensors
    return gate_up, down
