"""What a back end can do, held against a configuration (at construction) and against an input (at each call)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DispatchConfig
from ..errors import CapacityError, InputError
from ..routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a back end can do. A refusal rests on a limit of a library or of the hardware, quoted in `notes`.

    Attributes:
        devices: device types of x.
        dtypes: dtypes of x.
        rank_counts: group sizes, None for any.
        hidden_multiple: H must be a multiple of it.
        max_hidden, max_top_k: None for any.
        duplicates: the same expert twice in one token's top-k; where not, such a routing is refused on every rank.
        unequal_tokens: T may differ from rank to rank; where not, the back end compares T in its own exchange.
        zero_tokens: a rank may have T = 0; where not, T = 0 is refused on every rank.
        needs_max_tokens: whether config.max_tokens must be set.
        routers: routers it can serve, None for any.
        capacity: whether config.capacity_factor works (rows without a host sync).
        options: back-end keys it takes.
        max_tickets: how many micro-batches may be in flight at once, from `dispatch_preprocess` until the ticket is
            released; None for any number.
        host_syncs: host syncs of one micro-batch, forward and backward.
        graph_capture: whether a CUDA graph may capture it.
        uses_num_sms: whether config.num_sms has an effect.
        comm_sms: SMs that its communication keeps busy on a GPU while it runs, where config.num_sms does not say.
        packages: what must be installed, as pip requirements.
        deterministic: results repeat bit for bit; the contract suite holds it to that.
        notes: sentences on limits, each with its source.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    rank_counts: tuple[int, ...] | None = None
    hidden_multiple: int = 1
    max_hidden: int | None = None
    max_top_k: int | None = None
    duplicates: bool = True
    unequal_tokens: bool = True
    zero_tokens: bool = True
    needs_max_tokens: bool = False
    routers: tuple[str, ...] | None = None
    capacity: bool = False
    options: tuple[str, ...] = ()
    max_tickets: int | None = None
    host_syncs: int = 0
    graph_capture: bool = False
    uses_num_sms: bool = False
    comm_sms: int = 0
    packages: tuple[str, ...] = ()
    deterministic: bool = True
    notes: tuple[str, ...] = ()


def capability_reasons(caps: Capabilities, config: DispatchConfig, num_ranks: int) -> list[str]:
    """Sentences that say where a configuration exceeds a back end: value, limit, way out. Empty: nowhere."""
    hidden, top_k, experts = config.hidden_size, config.top_k, config.num_experts
    ranks = "" if caps.rank_counts is None else ", ".join(map(str, caps.rank_counts))
    unknown = sorted({key for key, _ in config.options} - set(caps.options))
    checks = [
        (experts % num_ranks != 0,
         f"num_experts = {experts} is not divisible by the {num_ranks} ranks of the group; "
         f"choose an ep_size that divides {experts}"),
        (top_k > experts, f"top_k = {top_k} is larger than num_experts = {experts}; lower it"),
        (caps.rank_counts is not None and num_ranks not in caps.rank_counts,
         f"it serves {ranks} rank(s), the group has {num_ranks}; take another dispatcher or ep_size"),
        (config.dtype not in caps.dtypes,
         f"it moves {', '.join(caps.dtypes)}, dtype is {config.dtype}; take another dispatcher or dtype"),
        (hidden % caps.hidden_multiple != 0,
         f"it needs a hidden_size that is a multiple of {caps.hidden_multiple}, got {hidden}; "
         "pad the model's hidden size or take another dispatcher"),
        (caps.max_hidden is not None and hidden > (caps.max_hidden or 0),
         f"it serves a hidden_size of at most {caps.max_hidden}, got {hidden}; take another dispatcher"),
        (caps.max_top_k is not None and top_k > (caps.max_top_k or 0),
         f"it serves a top_k of at most {caps.max_top_k}, got {top_k}; lower top_k or take another dispatcher"),
        (caps.max_tickets is not None and config.num_micro_batches > (caps.max_tickets or 0),
         too_many_tickets(caps, config.num_micro_batches)),
        (caps.needs_max_tokens and config.max_tokens is None,
         "it pads to max_tokens, which is not set; set it to the most tokens of one rank's micro-batch"),
        (config.max_tokens is not None and config.max_tokens < 1,
         f"max_tokens must be at least 1, got {config.max_tokens}; set it to the most tokens of one micro-batch"),
        (caps.routers is not None and config.router not in (caps.routers or ()),
         f"it needs router {' or '.join(caps.routers or ())}, got {config.router!r}; "
         "change the router or the dispatcher"),
        (config.capacity_factor is not None and not caps.capacity,
         f"it never needs a capacity, so capacity_factor = {config.capacity_factor} would have no effect; "
         "leave it unset"),
        (config.num_sms is not None and not caps.uses_num_sms,
         f"it launches no kernels of its own, so num_sms = {config.num_sms} would have no effect; leave it unset"),
        (bool(unknown),
         f"it knows no option {', '.join(map(repr, unknown))}; it knows {', '.join(caps.options) or 'none'}"),
    ]  # fmt: skip
    return [sentence for broken, sentence in checks if broken]


def too_many_tickets(caps: Capabilities, num_micro_batches: int) -> str:
    """Why a back end cannot interleave that many micro-batches."""
    return (
        f"it holds {caps.max_tickets} micro-batch(es) in flight, and {num_micro_batches} are to be interleaved; "
        "lower the number (train.intra_layer_micro_batch of a recipe) or take another dispatcher"
    )


def capture_refusal(name: str, caps: Capabilities, host_syncs: int) -> str | None:
    """Why a CUDA graph that is being captured cannot hold a micro-batch of a back end, None where it can."""
    if caps.graph_capture and host_syncs == 0:
        return None
    if caps.graph_capture:
        why = f"dispatcher {name!r} reads counts on the host as it is configured; set capacity_factor"
    else:
        why = f"dispatcher {name!r} does not serve that; take 'direct' with capacity_factor"
    return f"a CUDA graph is being captured, and {why}, or leave the layer out of the graph"


def is_captured(x: object) -> bool:
    """Whether work on a tensor goes into a CUDA graph that is being captured."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def row_capacity(config: DispatchConfig, num_ranks: int) -> int | None:
    """Expert rows that `capacity_factor` gives a rank room for: that many times T*K, at most what all ranks can send.

    T*K is what each of R ranks receives where loads are equal. None: rows are as many as there are.
    """
    if config.capacity_factor is None or config.max_tokens is None:
        return None
    sent = config.max_tokens * config.top_k
    return min(num_ranks * sent, max(1, math.ceil(config.capacity_factor * sent)))


def check_input(
    config: DispatchConfig, caps: Capabilities, group: dist.ProcessGroup | None, x_TH: Tensor, routing: Routing
) -> None:
    """Everything about an input that the host can see without a sync.

    Raises:
        InputError: shape, dtype or device of x or of the routing.
        CapacityError: more tokens than max_tokens.
    """
    hidden = config.hidden_size
    if not isinstance(x_TH, Tensor) or x_TH.layout != torch.strided or not isinstance(routing, Routing):
        what = x_TH.layout if isinstance(x_TH, Tensor) else type(x_TH).__name__
        raise InputError(f"x must be a dense tensor and routing a Routing, got {what} and {type(routing).__name__}")
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden:
        raise InputError(f"x must be [T, {hidden}] (hidden_size), got {tuple(x_TH.shape)}")
    device = x_TH.device
    if x_TH.dtype != getattr(torch, config.dtype):
        raise InputError(f"x is {x_TH.dtype}, the dispatcher was built for {config.dtype}; cast x or change dtype")
    if device.type not in caps.devices:
        raise InputError(f"x is on {x_TH.device}, {config.name!r} serves {', '.join(caps.devices)}")
    if group is not None and group.size() > 1 and not group_serves(group, device):
        raise InputError(
            f"x is on {x_TH.device}, but the process group has no back end for it; "
            "init_process_group with 'nccl' for cuda, 'gloo' for cpu"
        )
    if config.kernels == "cuda" and device.type != "cuda":
        raise InputError(f"x is on {x_TH.device}, kernels = 'cuda' move rows on a GPU only; set kernels = 'auto'")
    _check_routing(config, x_TH, routing)
    if not caps.zero_tokens and x_TH.shape[0] == 0:
        raise InputError(f"T = 0, dispatcher {config.name!r} needs a token on every rank; pad the micro-batch")
    if config.max_tokens is not None and x_TH.shape[0] > config.max_tokens:
        raise CapacityError(
            f"{x_TH.shape[0]} tokens are more than max_tokens = {config.max_tokens}; raise max_tokens or send fewer"
        )


def _check_routing(config: DispatchConfig, x_TH: Tensor, routing: Routing) -> None:
    ids = routing.expert_ids
    if tuple(ids.shape) != (x_TH.shape[0], config.top_k):
        raise InputError(f"expert_ids must be [{x_TH.shape[0]}, {config.top_k}] (T, top_k), got {tuple(ids.shape)}")
    if ids.device != x_TH.device:
        raise InputError(f"expert_ids are on {ids.device}, x on {x_TH.device}; put both on one device")
    if routing.num_experts != config.num_experts:
        raise InputError(f"the routing has {routing.num_experts} experts, the dispatcher {config.num_experts}")


def check_output(config: DispatchConfig, num_rows: int, y_NH: Tensor) -> None:
    """Refuse an output of the experts that is no row [H] for each of the N rows of their input.

    Raises:
        InputError: shape or dtype.
    """
    wanted, dtype = (num_rows, config.hidden_size), getattr(torch, config.dtype)
    if tuple(y_NH.shape) != wanted or y_NH.dtype != dtype:
        raise InputError(
            f"the experts' output must be {wanted} {dtype}, one row for each row of the ExpertInput, "
            f"got {tuple(y_NH.shape)} {y_NH.dtype}"
        )


def group_serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a process group has a back end for the device's type."""
    return any(device.type == served.type for served in group._device_types)
