"""The boundary of torch.compile: what runs as it stands inside a compiled model.

Row counts change with every batch, and a trace would bake them in, guard on them or fail. The stages of a dispatcher,
the movement of rows, routed experts and the layer around them are therefore left out of every graph; a compiled model
breaks its graph there and is traced on both sides. Routers and shared experts may be compiled, one by one.
(torch 2.11 traces `gather_rows` without an error and then returns zero gradients; 2.13 does not.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(fn: Callable[P, T]) -> Callable[P, T]:
    """Decorator: torch.compile neither traces `fn` nor what it calls.

    `torch.compiler.disable` does that, but as a decorator it imports the compiler, which takes as long as torch itself.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        untraced: Callable[P, T] = torch.compiler.disable(fn)
        return untraced(*args, **kwargs)

    return call
