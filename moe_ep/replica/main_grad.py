"""Where a master's complete gradient goes: to autograd, or straight to the float32 buffer that Megatron keeps for it.

Megatron-Core's DistributedDataParallel gives each parameter a buffer, `main_grad`, and a flag,
`grad_added_to_main_grad`. Its hook adds what autograd brings to the buffer, unless the flag says that a kernel has done
so already, which is how its linear layers add weight gradients in float32 where `gradient_accumulation_fusion` is on. A
gradient that was reduced in float32 takes the same way, with fusion on or off, and is not rounded to the parameter's
dtype first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def deliver(master: Tensor, total: Tensor) -> Tensor:
    """Hand over the complete gradient, float32, of a master; returns what autograd is to bring to it.

    With `main_grad` that is zeros: the hook has to run, which starts the framework's own reduction, and wants a
    gradient there. Whoever adds it to the buffer all the same adds nothing.
    """
    if not add_to_buffer(master, total):
        return total.to(master.dtype)
    master.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(master)


def add_to_buffer(master: Tensor, part: Tensor) -> bool:
    """Add a part of the gradient to Megatron's buffer, which gets the rest in another way; False: there is none."""
    buffer = _buffer(master)
    if buffer is None:
        return False
    with torch.no_grad():
        buffer.add_(part)
    return True


def _buffer(master: Tensor) -> Tensor | None:
    """Megatron's buffer; its FSDP gives parameters one only while it reduces, and takes gradients as they come."""
    if not hasattr(master, "grad_added_to_main_grad") or hasattr(master, "__fsdp_param__"):
        return None
    found = getattr(master, "main_grad", None)
    return found if isinstance(found, Tensor) and found.shape == master.shape else None
