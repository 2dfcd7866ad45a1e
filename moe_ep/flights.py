"""What a layer knows of one micro-batch: on its way through it, and what it says of it at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .dispatch.ticket import Ticket
from .losses import RouterAux
from .replica.lease import Lease
from .replica.runtime import ReplicaRuntime
from .routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEAux:
    """What a layer says about one micro-batch, as device tensors (no host sync).

    Attributes:
        loss: float32 [], coefficient-weighted sum of the two losses below, differentiable; add it to the model's.
        aux_loss, z_loss: float32 [], detached, without their coefficients; 0 where off.
        load: int64 [E], routes of this rank's valid tokens to each expert.
        num_tokens: int64 [], valid tokens. The losses are means over them; weight pieces by it when adding up.
        cross_rank_routes: int64 [], routes that left this rank.
        rank_load: int64 [R], routes of this rank's tokens to each rank, where they are computed: replicas included.
        replicas: int64 [], experts of other ranks that this rank holds copies of.
    """

    loss: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    load: Tensor
    num_tokens: Tensor
    cross_rank_routes: Tensor
    rank_load: Tensor
    replicas: Tensor


pytree.register_dataclass(MoEAux)  # for FSDP2, see Routing


@dataclass(slots=True, kw_only=True)
class Routed:
    """One micro-batch behind the router: to logical experts, and behind `place` to instances of them."""

    x: Tensor
    x_TH: Tensor
    routing: Routing
    router_aux: RouterAux
    micro_batch: int
    lease: Lease | None
    rank_rows: Tensor | None = None  # int64 [R], where replicas change whom this rank's rows go to


@dataclass(slots=True, kw_only=True)
class LayerFlight:
    """One micro-batch on its way through the layer."""

    x: Tensor
    ticket: Ticket
    router_aux: RouterAux
    lease: Lease | None = None
    rank_rows: Tensor | None = None  # see Routed


@contextlib.contextmanager
def releasing(lease: Lease | None) -> Iterator[None]:
    """Give replica slots back where nobody goes on."""
    try:
        yield
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def given(name: str, lease: Lease | None) -> dict[str, Any]:
    """An argument that experts and layers of others need not know where there is nothing to give."""
    return {} if lease is None else {name: lease}


def copies_held(replicas: ReplicaRuntime | None, lease: Lease | None, like: Tensor) -> Tensor:
    """How many copies this rank holds for a micro-batch, int64 [] where `like` is."""
    return like.new_zeros(()) if replicas is None or lease is None else replicas.copies_held(lease)
