"""What a caller hands to a stack of DominoLayers, and what the pieces of a layer return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import InputError


def check_listed(xs: Any, valid: Any, what: type = Tensor) -> None:
    """Refuse what is no list of micro-batches; a tensor would be taken apart along its first axis."""
    count = 1 if isinstance(xs, Tensor) else "M"
    hint = f"pass lists: {count} tensor(s) [..., H], and as many masks [...] or None"
    for name, given in (("micro-batches", xs), ("masks", valid)):
        if not isinstance(given, tuple | list) and not (given is None and name == "masks"):
            raise InputError(f"got {_kind_of(given)} in place of a list of {name}; {hint}, such as stack([x], [valid])")
    if not xs or (valid is not None and len(valid) != len(xs)):
        masks = "" if valid is None else f" and {len(valid)} masks"
        raise InputError(f"got {len(xs)} micro-batches{masks}; give at least one, and one mask (or None) for each")
    for i, x in enumerate(xs):
        if not isinstance(x, what):
            raise InputError(f"micro-batch {i} must be a {what.__name__}, got {_kind_of(x)}")


def two_of_shape(returned: Any, shape: torch.Size, where: str) -> tuple[Tensor, Tensor]:
    """What `attention` has to return; a tensor of two rows would be taken apart as if it were two tensors."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise InputError(
            f"{where} must return two tensors (h, n) of shape {list(shape)}, the residual stream and its norm, got "
            f"{_kind_of(returned)}"
        )
    h, n = returned
    for tensor in (h, n):
        check_shape(tensor, shape, where)
    return h, n


def check_shape(tensor: Any, shape: torch.Size, where: str) -> None:
    """What a piece of a layer returns has the shape of its input; anything else would be broadcast or mixed up."""
    if not isinstance(tensor, Tensor) or tensor.shape != shape:
        raise InputError(f"{where} must return tensors of shape {list(shape)}, like its input, got {_kind_of(tensor)}")


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{len(value)} of them" if isinstance(value, tuple | list) else type(value).__name__
