"""Megatron's process groups over the ranks of a job, from the first to the last."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_ep.dispatch import close_dispatchers
from moe_ep.errors import Unavailable
from recipes.ranks import Ranks


def check_device(device: torch.device) -> None:
    """Megatron-Core takes a GPU for granted.

    Raises:
        Unavailable: there is none.
    """
    if device.type == "cuda":
        return
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as err:
        raise Unavailable(f"Megatron-Core runs on GPUs only, and this rank has none ({err}); use pretrain.py") from err


def open_groups(ranks: Ranks) -> None:
    """Megatron's process groups over the running ranks. It wants them of one rank, too."""
    if not dist.is_initialized():
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks.ep_size)


def close() -> None:
    """Leave all process groups in order; every rank is done."""
    for group in {parallel_state.get_expert_model_parallel_group(), None}:
        close_dispatchers(group)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
