"""How an op becomes known to torch: a schema, a reference for CPU, a kernel for CUDA, a fake for tracing. Once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "moe_ep"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # ops live as long as it does
Op = Callable[..., Any]


def register(schema: str, *, reference: Op, kernel: Op, fake: Op) -> Any:
    """Define `moe_ep::NAME` by its schema, unless that has happened; returns the op.

    Autograd is not part of the op: callers wrap it in an autograd function of their own, which saves integers only.
    """
    name = schema.partition("(")[0]
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        _library.define(schema)
        _library.impl(name, reference, "CPU")
        _library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
