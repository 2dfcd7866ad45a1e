"""The two communications of `direct`, each with its transpose: what one pushes forward the other gives back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.direct import Peers
from ..kernels.direct_types import Received, Shape, Trip
from .transfer import Tensors

SMS_BESIDE_GEMMS = 32  # moving on what came takes more of them than sending it
_BLOCKS_OF_SM = 2  # that the kernels' registers allow


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Thread blocks of each kernel: (that send, in all), two of them an SM."""

    push: tuple[int, int]
    expand: tuple[int, int]
    give_back: tuple[int, int]

    @property
    def sms(self) -> int:
        """SMs that the largest of them keeps busy."""
        return max(self.push[1], self.expand[1], self.give_back[1]) // _BLOCKS_OF_SM


class Push:
    """Rows and weights to the experts' ranks. Its transpose brings rows' and weights' gradients back.

    Args:
        settle: exchanges counts on the current stream; sets plan and capacities of the trip.

    """

    def __init__(self, peers: Peers, trip: Trip, blocks: Blocks, expand: bool, settle: Callable[[Trip], None]) -> None:
        self.peers, self.trip, self.blocks, self.expand = peers, trip, blocks, expand
        self._received: Received | None = None
        self._settle: Callable[[Trip], None] | None = settle

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """(x [T, H], weights float32 [T, K]) to (rows [U or N, H], row weights float32 [N])."""
        x_TH, weights_TK = payload
        assert self._settle is not None, "a trip starts once"
        self._settle(self.trip)
        self._settle = None  # it holds the dispatcher, which backward does not need
        blocks = self.blocks.expand if self.expand else self.blocks.push
        received = self.peers.push_first(x_TH, weights_TK, self.trip, expand=self.expand, blocks=blocks)
        self._received = received
        return (received.rows, received.row_weights), []

    def take(self) -> Received:
        """What came, with the integers for the experts; once, since the experts keep what they need of it."""
        received, self._received = self._received, None
        assert received is not None, "taken before it came, or twice"
        return received

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """Gradients of the rows and of their weights to those of x [T, H] and of the weights [T, K]."""
        d_rows, d_weights = grads
        dx_TH, d_weights_TK = self.peers.give_back(
            d_rows, self.trip, add_routes=self.expand, row_weights=d_weights, blocks=self.blocks.give_back
        )
        assert d_weights_TK is not None, "weights travel"
        return (dx_TH, d_weights_TK), []

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing is left to do."""
        return parts


class GiveBack:
    """Expert rows [N, H] home, added up to y [T, H]. Its transpose pushes dy to every place of a token's routes."""

    def __init__(self, peers: Peers, trip: Trip, blocks: Blocks) -> None:
        self.peers, self.trip, self.blocks = peers, trip, blocks

    def forward(self, payload: Tensors) -> tuple[Tensors, list[Any]]:
        """(y [N, H]) to (y [T, H])."""
        y_TH, _ = self.peers.give_back(payload[0], self.trip, add_routes=True, blocks=self.blocks.give_back)
        return (y_TH,), []

    def backward(self, grads: Tensors) -> tuple[Tensors, list[Any]]:
        """(dy [T, H]) to (dy [N, H]); rows behind the last stay unwritten."""
        return (self.peers.push_again(grads[0], self.trip, expand=True, blocks=self.blocks.expand),), []

    def reduce(self, parts: Tensors) -> Tensors:
        """Nothing is left to do."""
        return parts


def capacities(factor: float, shape: Shape) -> tuple[int, int]:
    """(row_capacity, unique_capacity): `factor` x balanced rows, at most what all ranks can send."""
    tokens = shape.num_ranks * shape.max_tokens
    rows = min(tokens * shape.top_k, max(1, math.ceil(factor * shape.max_tokens * shape.top_k)))
    return rows, min(rows, tokens)


def default_blocks(device: torch.device, num_sms: int | None, *, beside_gemms: bool = False) -> Blocks:
    """From the SMs that may be used: a third of a push sends, half of what gives back; all receive when they have sent.

    A warp that has sent a chunk waits until it has arrived, so sending takes more blocks than would fill the link.

    Args:
        device: a GPU.
        num_sms: how many; None: all, or `SMS_BESIDE_GEMMS`.
        beside_gemms: whether micro-batches interleave, so that GEMMs run at the same time.
    """
    total = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = (SMS_BESIDE_GEMMS if beside_gemms else total) if num_sms is None else num_sms
    most = _BLOCKS_OF_SM * min(wanted, total)
    return Blocks(push=(most // 3 or 1, most), expand=(most // 4 or 1, most), give_back=(most // 2, most))
