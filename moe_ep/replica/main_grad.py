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


def deliver(master: Tensor, grad: Tensor, total: Tensor, hot: Tensor | None, *, fresh: bool) -> Tensor:
    """Hand over the complete gradient of a master [L, ...]; returns what autograd is to bring to it.

    With `main_grad` that is a gradient of no value: the hook, which starts the framework's own reduction, wants one
    there, and leaves it alone. (Megatron's linear layers do the same.)

    Args:
        master: the parameter, or what was made of it.
        grad: of its own rows, in its dtype.
        total: float32 [B, ...], complete, of the experts `hot`; None: of all.
        hot: int64 [B].
        fresh: nobody else holds `grad`, which may be written to.
    """
    buffer = _buffer(master)
    with torch.no_grad():
        if buffer is None:
            return _whole(grad, total, hot, fresh and not grad.requires_grad)
        if hot is None:
            buffer.add_(total)
        else:
            sums = buffer.index_select(0, hot) + total
            buffer.add_(grad).index_copy_(0, hot, sums.to(buffer.dtype))
    master.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    kept = getattr(master, "zero_out_wgrad", False)  # the hook adds it all the same
    return torch.zeros_like(master) if kept else torch.empty_like(master)


def _whole(grad: Tensor, total: Tensor, hot: Tensor | None, fresh: bool) -> Tensor:
    if hot is None:
        return total.to(grad.dtype)
    whole = grad if fresh and grad.is_contiguous() else grad.clone(memory_format=torch.contiguous_format)
    return whole.index_copy_(0, hot, total.to(grad.dtype))


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
