"""Which code routes and moves rows on a GPU: the CUDA kernels of `moe_ep.kernels`, or plain torch.

The choice is made once, where a dispatcher is built, and the kernels are compiled there if they have not been: never in
the middle of a step, while other ranks wait in a collective. On a CPU it is always torch.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
import torch.distributed as dist

from .config import DispatchConfig

Group = dist.ProcessGroup | None


@functools.cache
def rows_module() -> ModuleType:
    """`moe_ep.kernels.rows`, imported at first use: importing it registers its ops with torch."""
    from .kernels import rows

    return rows


@functools.cache
def routes_module() -> ModuleType:
    """`moe_ep.kernels.routes`, imported at first use."""
    from .kernels import routes

    return routes


@functools.cache
def router_module() -> ModuleType:
    """`moe_ep.kernels.router`, imported at first use."""
    from .kernels import router

    return router


@functools.cache
def split_module() -> ModuleType:
    """`moe_ep.kernels.split`, imported at first use."""
    from .kernels import split

    return split


@functools.cache
def balance_module() -> ModuleType:
    """`moe_ep.kernels.balance`, imported at first use."""
    from .kernels import balance

    return balance


@functools.cache
def swiglu_module() -> ModuleType:
    """`moe_ep.kernels.swiglu`, imported at first use."""
    from .kernels import swiglu

    return swiglu


def kernels_missing(config: DispatchConfig, group: Group) -> str | None:
    """Why the kernels cannot serve a configuration on this rank, in words behind "because"; None: they can.

    Compiles them if need be, which takes half a minute once per machine and version.
    """
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    if group is not None and not any(device.type == "cuda" for device in group._device_types):
        return "the process group serves no CUDA tensors"
    try:
        from .kernels import library
    except ModuleNotFoundError:
        return "moe_ep.kernels is not installed: this moe_ep was put on the path and not installed by pip"
    limit = routes_module().MAX_GROUPS
    if config.num_experts > limit:
        return f"num_experts = {config.num_experts} is more than the {limit} that they serve"
    return library.missing(torch.cuda.current_device())


def choose_kernels(config: DispatchConfig, group: Group) -> bool:
    """Whether the kernels move a dispatcher's CUDA tensors. Where they should and cannot, rank 0 says so."""
    if config.kernels == "torch" or not torch.cuda.is_available():
        return False
    reason = kernels_missing(config, group)
    if reason is not None and (group is None or (group.rank() == 0 and "cuda" in str(group._device_types))):
        warnings.warn(f"kernels = 'auto': plain torch moves the rows, because {reason}", RuntimeWarning, stacklevel=2)
    return reason is None


def kernel_reasons(config: DispatchConfig, group: Group) -> list[str]:
    """The sentence that refuses kernels = 'cuda' on this rank, if there is one."""
    reason = kernels_missing(config, group) if config.kernels == "cuda" else None
    return [] if reason is None else [f"kernels = 'cuda' cannot be had, because {reason}; take 'auto' or 'torch'"]
