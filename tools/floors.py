"""The least time a dispatch or combine can take: bytes that must cross links, and bytes that must move through HBM.

One copy of a token per destination rank crosses a link, so link bytes are counted per (token, other rank), not per
route. A floor is the larger of link bytes / link rate and HBM bytes / HBM rate; of several ranks the slowest counts.

    form                 rows through HBM (this rank, read plus written)
    dispatch, unique     T out of x, U into and U out of the receive buffer
    dispatch, expanded   the same, plus N written
    combine              N read, the crossing rows written and read, T written

Backward moves the same rows the other way: the transpose of a dispatch costs a combine, that of a combine an
expanded dispatch.

Worked example. Two ranks of two experts, K = 2. Rank 0 has tokens with ids [[0, 2], [2, 3], [1, -1]], rank 1 has
[[0, 1]]. Rank 0 sends tokens 0 and 1 (2 rows, although 3 routes leave) and receives 1 row. It keeps tokens 0 and 2, so
U = 3; its experts compute N = 4 rows: (0,0), (2,0) of its own and both of rank 1's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Form = Literal["unique", "expanded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the hardware gives; the defaults were measured on two H200 joined by NVLink (NV18).

    Attributes:
        link_gbs: peer-to-peer copy of one direction, 10^9 bytes per second.
        hbm_tbs: device memory, read plus written, 10^12 bytes per second.
    """

    link_gbs: float = 380.0
    hbm_tbs: float = 4.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Rows of one rank in one micro-batch.

    Attributes:
        tokens: T.
        unique: U, rows received, one per (token of any rank, this rank), its own tokens included.
        rows: N, routes that this rank's experts compute.
        sent, received: unique rows to and from *other* ranks.
    """

    tokens: int
    unique: int
    rows: int
    sent: int
    received: int

    @property
    def crossing(self) -> int:
        """Rows through the busier direction of this rank's link."""
        return max(self.sent, self.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes of one rank and the time they need at least."""

    link_bytes: int
    hbm_bytes: int
    us: float


def count_destinations(ids_TK: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """What one rank's ids ask of each rank: (unique rows, routes), each int64 [R]; ids of -1 are no routes."""
    dest_TK = torch.where(ids_TK >= 0, ids_TK // (num_experts // num_ranks), num_ranks)
    sent = torch.zeros((ids_TK.shape[0], num_ranks + 1), dtype=torch.bool, device=ids_TK.device)
    unique_R = sent.scatter_(1, dest_TK, True)[:, :num_ranks].sum(0)
    routes_R = torch.stack([(dest_TK == rank).sum() for rank in range(num_ranks)])
    return unique_R, routes_R


def count_traffic(tokens_R: Sequence[int], unique_RR: Tensor, routes_RR: Tensor) -> list[Traffic]:
    """Traffic of every rank from what each source (row) asks of each destination (column)."""
    found = []
    for rank, tokens in enumerate(tokens_R):
        own = int(unique_RR[rank, rank])
        unique = int(unique_RR[:, rank].sum())
        sent = int(unique_RR[rank].sum()) - own
        rows = int(routes_RR[:, rank].sum())
        found.append(Traffic(tokens=tokens, unique=unique, rows=rows, sent=sent, received=unique - own))
    return found


def traffic_of_ids(ids_by_rank: Sequence[Tensor], num_experts: int) -> list[Traffic]:
    """Traffic of every rank from all ranks' ids [T, K]."""
    counts = [count_destinations(ids, num_experts, len(ids_by_rank)) for ids in ids_by_rank]
    unique_RR = torch.stack([unique for unique, _ in counts])
    routes_RR = torch.stack([routes for _, routes in counts])
    return count_traffic([ids.shape[0] for ids in ids_by_rank], unique_RR, routes_RR)


def dispatch_floor(traffic: Traffic, row_bytes: int, form: Form, rates: Rates) -> Floor:
    """Floor of one rank's dispatch to unique rows, or further to expert rows."""
    rows = traffic.tokens + 2 * traffic.unique + (traffic.rows if form == "expanded" else 0)
    return _floor(traffic, rows, row_bytes, rates)


def combine_floor(traffic: Traffic, row_bytes: int, rates: Rates) -> Floor:
    """Floor of one rank's combine. Of the crossing rows it writes those it returns and reads those that come home."""
    rows = traffic.rows + traffic.sent + traffic.received + traffic.tokens
    return _floor(traffic, rows, row_bytes, rates)


def slowest_us(floors: Sequence[Floor]) -> float:
    """The floor of a collective: every rank waits for the slowest."""
    return max(floor.us for floor in floors)


def _floor(traffic: Traffic, hbm_rows: int, row_bytes: int, rates: Rates) -> Floor:
    link_bytes, hbm_bytes = traffic.crossing * row_bytes, hbm_rows * row_bytes
    us = max(link_bytes / (rates.link_gbs * 1e3), hbm_bytes / (rates.hbm_tbs * 1e6))
    return Floor(link_bytes=link_bytes, hbm_bytes=hbm_bytes, us=us)
