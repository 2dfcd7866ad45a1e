"""What NCCL EP needs to know of a configuration: its options, and sizes rounded to what the library takes.

Pure numbers: neither the library nor a GPU is needed. Sources are named at each limit: NVIDIA/nccl-extensions, folder
nccl_ep, as packed in nccl-extensions 0.1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..config import DispatchConfig
from .capabilities import Capabilities

EXPERT_MAJOR, FLAT = "expert_major", "flat"
OPTIONS = ("budget_rows", "layout", "low_latency")
# include/common.hpp, MAX_SUPPORTED_TOKENS_PER_RANK; RELEASE.md, "Max Num Tokens Support"
MAX_TOKENS = 8192
# a group makes NCCL_EP_HT_DISPATCH_BLOCKS + 1 = 17 barriers (nccl_ep.cc, init_ht_internode); dispatch takes one for
# each of its blocks and combine the last, so that more blocks would share or overrun them
MAX_SMS = 16
_RANKS_PER_HOST = 8
_ALIGN = 16  # bytes of a row, for the bulk copies of the kernels
_MULTIPLE = 8  # elements of a row (ht_ep.cuh: "HIDDEN_DIM must satisfy TMA alignment", counted in two-byte elements)
# elements of a low-latency row: whole iterations of a warp (ll_ep.cuh: "Invalid hidden") and, with 4 bytes for each 128
# elements behind them, slots of a multiple of 16 bytes ("Invalid vectorization")
_LOW_LATENCY_MULTIPLE = 512
# of a low-latency row: a block has 32 warps, one of them fetches and each other one adds up 1024 bytes (ll_ep_smem.cuh)
_LOW_LATENCY_BYTES = 31 * 1024


CAPABILITIES = Capabilities(
    devices=("cuda",),
    dtypes=("float32", "bfloat16", "float16"),
    rank_counts=(2, 4, *range(8, 65, 8)),
    max_top_k=32,
    duplicates=False,
    needs_max_tokens=True,
    capacity=True,
    options=OPTIONS,
    host_syncs=3,
    uses_num_sms=True,
    comm_sms=16,
    packages=("nccl-extensions==0.1.0", "nccl4py==0.6.0"),
    notes=(
        "NCCL EP: 'nRanks must be 2, 4 or multiple of 8' (nccl-extensions, nccl_ep/ep_test.py); 'Maximum of 64 "
        "GPUs (8 nodes x 8 GPUs)' (RELEASE.md).",
        "NCCL EP keeps one bit for each expert of a token (ht_ep_adapter.cu, convert_topk_to_routing_map), so the "
        "same expert twice in a token would be one route.",
        "NCCL EP gathers a token's slots with one warp ('MaxTopK <= 32', ht_ep.cuh, local_permute_reduce).",
        "NCCL EP combines 'bf16/fp16/fp32' (nccl_ep.cc, ncclEpCombine).",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keys of `[moe.nccl_ep]`.

    Attributes:
        layout: "expert_major": the library groups received rows by expert; "flat": a row for each token, expanded here.
        budget_rows: expert rows that a rank can receive, fixed, so that nothing is read on the host; None: counted.
        low_latency: micro-batches under no_grad take the library's low-latency kernels.
    """

    layout: str = EXPERT_MAJOR
    budget_rows: int | None = None
    low_latency: bool = False


def read_options(config: DispatchConfig) -> Options:
    """The options as they stand; `option_reasons` says what is wrong with them."""
    return Options(**{key: value for key, value in config.options if key in OPTIONS})


def option_reasons(config: DispatchConfig) -> list[str]:
    """Sentences about options that do not fit; empty: all do."""
    options = read_options(config)
    rows: Any = options.budget_rows
    fixed = rows is not None or config.capacity_factor is not None
    tokens = config.max_tokens or 0
    is_count = type(rows) is int and rows >= 1
    element_bytes = getattr(torch, config.dtype).itemsize
    wide = low_latency_row(config.hidden_size, element_bytes) * element_bytes
    checks = [
        (options.layout not in (EXPERT_MAJOR, FLAT),
         f"layout = {options.layout!r} is not one of '{EXPERT_MAJOR}', '{FLAT}'"),
        (type(options.low_latency) is not bool, f"low_latency = {options.low_latency!r} must be true or false"),
        (options.low_latency is True and wide > _LOW_LATENCY_BYTES,
         f"low_latency needs rows of {wide} bytes for hidden_size = {config.hidden_size}, more than the "
         f"{_LOW_LATENCY_BYTES} that the library adds up in one block (ll_ep_smem.cuh: recv_decode_warps); leave "
         "low_latency unset"),
        (rows is not None and not is_count, f"budget_rows = {rows!r} must be a number of rows, at least 1"),
        (is_count and config.capacity_factor is not None,
         f"budget_rows = {rows} and capacity_factor = {config.capacity_factor} both say how many rows a rank can "
         "receive; set one of them"),
        (is_count and rows < tokens,
         f"budget_rows = {rows} is less than max_tokens = {tokens}, which the library refuses (nccl_ep.h: "
         "max_recv_tokens_per_rank must be >= max_dispatch_tokens_per_rank); raise it or leave it unset"),
        (fixed and options.layout == FLAT,
         "layout = 'flat' reads the number of received rows on the host in every dispatch (nccl_ep.cc, "
         "ncclEpDispatch: need_recv_counts), so a fixed number of rows would save nothing; take layout = "
         f"'{EXPERT_MAJOR}', or leave budget_rows and capacity_factor unset"),
        (tokens > MAX_TOKENS,
         f"max_tokens = {tokens} is more than the {MAX_TOKENS} that the library serves (common.hpp: "
         "MAX_SUPPORTED_TOKENS_PER_RANK); make micro-batches smaller or take another dispatcher"),
        (config.num_sms is not None and not 1 <= config.num_sms <= MAX_SMS,
         f"num_sms = {config.num_sms} is outside of 1 to {MAX_SMS}, the barriers that the library has for its blocks "
         "(nccl_ep.cc: lsaBarrierCount)"),
    ]  # fmt: skip
    return [sentence for broken, sentence in checks if broken]


def low_latency_row(hidden: int, element_bytes: int) -> int:
    """Elements of a low-latency row: H and 16 bytes for the token's number, a multiple of 512."""
    used = round_up(hidden * element_bytes, _ALIGN) + _ALIGN
    return round_up(used // element_bytes, _LOW_LATENCY_MULTIPLE)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes handed to the library. Rounding up is exact: what is added holds no token, no expert and no value.

    Attributes:
        num_ranks, num_local, top_k, hidden: R, L, K, H.
        element_bytes: of x.
        flat: the layout.
        local_experts: L rounded up, so that the experts of one host are a multiple of 4 (ht_ep_adapter.cu: "experts_
            per_lsa_team must be multiple of 4").
        max_tokens: of one rank, a multiple of 16: the library wants tokens times ranks of a host to be a multiple of 4
            (ht_ep_adapter.cu: "lsa_team_size <= 3 requires even num_tokens_per_rank").
        row: elements of a row, a multiple of 8 and of 16 bytes, 32 bytes at least.
        budget: rows that a rank can receive, None: as many as come.
    """

    num_ranks: int
    num_local: int
    top_k: int
    hidden: int
    element_bytes: int
    flat: bool
    local_experts: int
    max_tokens: int
    row: int
    budget: int | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it travels."""
        return self.row * self.element_bytes

    @property
    def num_experts(self) -> int:
        """E, the added experts among them."""
        return self.local_experts * self.num_ranks

    @property
    def most_rows(self) -> int:
        """What the library makes room for (nccl_ep.cc, ncclEpCreateGroup: eager bound)."""
        return self.budget or self.num_ranks * self.max_tokens * (1 if self.flat else self.top_k)

    def group_bytes(self) -> int:
        """Device memory of a group (nccl_ep.cc, init_ht_intranode).

        Both directions' rows and weights, room for scales, the workspace and the map of all ranks' routes.
        """
        tokens = self.num_ranks * self.max_tokens
        rows = 2 * tokens * self.row_bytes
        weights = 2 * self.most_rows * self.local_experts * min(self.num_ranks, _RANKS_PER_HOST) * 4
        routes = tokens * math.ceil(self.num_experts / 8)
        return rows + weights + self.most_rows * self.row_bytes + (32 << 20) + routes

    def handle_bytes(self) -> int:
        """Device memory of one handle (nccl_ep.cc, HtBlockLayout)."""
        tokens, rows, ranks = self.max_tokens, self.most_rows, min(self.num_ranks, _RANKS_PER_HOST)
        maps = tokens * (1 + ranks * 12) + rows * self.local_experts
        slots = 0 if self.flat else rows * self.top_k * 8 + tokens * self.num_ranks * 4
        return maps + tokens * self.num_experts * 4 + tokens * self.top_k * 8 + slots

    @property
    def low_latency_row(self) -> int:
        """Elements of a low-latency row."""
        return low_latency_row(self.hidden, self.element_bytes)

    def low_latency_bytes(self) -> int:
        """Device memory of a low-latency group with rank-major rows (common.hpp, LowLatencyLayout)."""
        row_bytes = self.low_latency_row * self.element_bytes
        message = round_up(4 + 8 * self.top_k, _ALIGN) + row_bytes
        reply = row_bytes + row_bytes // 256 * 4
        out = self.max_tokens * (1 + self.num_ranks) * message
        home = self.max_tokens * (self.num_ranks + self.top_k) * reply
        signals = 2 * round_up(4 * self.num_local * self.num_ranks, 128)
        return 2 * max(out, home) + signals + (32 << 20)


def make_sizes(config: DispatchConfig, num_ranks: int, element_bytes: int) -> Sizes:
    """Sizes of a configuration that has passed `option_reasons`, with max_tokens set."""
    assert config.max_tokens is not None, "max_tokens is needed"
    options = read_options(config)
    num_local = config.num_experts // num_ranks
    max_tokens = round_up(config.max_tokens, 16)
    budget = options.budget_rows
    if config.capacity_factor is not None:
        budget = math.ceil(config.capacity_factor * config.max_tokens * config.top_k)
    return Sizes(
        num_ranks=num_ranks,
        num_local=num_local,
        top_k=config.top_k,
        hidden=config.hidden_size,
        element_bytes=element_bytes,
        flat=options.layout == FLAT,
        local_experts=round_up(num_local, 4 // math.gcd(4, min(num_ranks, _RANKS_PER_HOST))),
        max_tokens=max_tokens,
        row=max(round_up(config.hidden_size, max(_MULTIPLE, _ALIGN // element_bytes)), 2 * _ALIGN // element_bytes),
        budget=None if budget is None else max(budget, max_tokens),
    )
