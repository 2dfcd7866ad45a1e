"""How an op becomes known to torch: a schema, a reference for CPU, a kernel for CUDA, a fake for tracing. Once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "moe_ep"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # ops live as long as it does
Op = Callable[..., Any]


class KernelOp:
    """An op of torch that calls its kernel without torch in between where nobody watches.

    Torch's way to an op in Python takes as long as the launch, and while rows wait for the host that is time lost. It
    is needed where tensors are fakes or where a mode looks at every op (tracing, selective checkpointing, counters).

    Attributes:
        op: as torch knows it; the first argument is a tensor.
    """

    __slots__ = ("_kernel", "op")

    def __init__(self, op: Op, kernel: Op) -> None:
        self.op, self._kernel = op, kernel

    def __call__(self, first: Tensor, *others: Any) -> Any:
        """Call the op."""
        if type(first) is Tensor and first.is_cuda and not torch._C._len_torch_dispatch_stack():
            return self._kernel(first, *others)
        return self.op(first, *others)


def register(schema: str, *, reference: Op | None, kernel: Op, fake: Op) -> KernelOp:
    """Define `moe_ep::NAME` by its schema, unless that has happened; returns the op.

    Without a reference there is no such op on a CPU.

    Autograd is not part of the op: callers wrap it in an autograd function of their own, which saves integers only.
    """
    name = schema.partition("(")[0]
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        _library.define(schema)
        if reference is not None:
            _library.impl(name, reference, "CPU")
        _library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return KernelOp(getattr(getattr(torch.ops, NAMESPACE), name).default, kernel)
