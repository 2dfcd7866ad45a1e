"""An output of a layer that may still be under way, and is waited for where it is needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree

from .dispatch.base import Dispatcher
from .dispatch.ticket import Stage, Ticket
from .errors import ProtocolError
from .replica.lease import Lease
from .tracing import stage_range


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
