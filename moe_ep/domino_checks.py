"""What a caller hands to a stack of DominoLayers, what the pieces of a layer return, and what a schedule asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dispatch.waits import ALL_WAITS
from .errors import InputError, ProtocolError, RecipeError
from .schedule import Schedule

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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


def check_taken_apart(moe: Any) -> None:
    """Refuse what would be passed by in silence: a layer's `moe` is never called as a whole, only its pieces are."""
    if not isinstance(moe, nn.Module):
        return
    found = ""
    if not hasattr(type(moe), "prepare") and not hasattr(moe, "_orig_mod"):  # a compiled layer runs as it stands
        found = f"{type(moe).__name__} wraps it"
    elif any(getattr(moe, hooks) for hooks in _HOOKS):
        found = f"{type(moe).__name__} has hooks"
    if found:
        raise RecipeError(
            f"`moe` of a DominoLayer is never called as a whole, so what is around it would not run: {found}; wrap or "
            "hook the layer, or `moe.router`, `moe.experts` and `moe.shared` (fully_shard too), and recompute with "
            "DominoLayer.recompute_in"
        )


def check_region(recorded: bool) -> None:
    """Inside of a region: it must record gradients where its caller does, or they are lost without a word."""
    if recorded and not torch.is_grad_enabled():
        raise RecipeError(
            "the region of recompute_in runs without recording gradients, and its caller records them, so they would "
            "be lost; pass moe_ep.recompute_region, or a checkpoint with use_reentrant=False"
        )


def check_group(returned: Any, count: int, what: type) -> Any:
    """What a region has to return: what the function that it was given returned, once, M pending outputs and M aux."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        pending, auxes = returned
        lists = isinstance(pending, tuple | list) and isinstance(auxes, tuple | list)
        if lists and len(pending) == len(auxes) == count and all(isinstance(each, what) for each in pending):
            return returned
    raise RecipeError(
        f"the region of recompute_in must call the function that it is given once and return what that returns, got "
        f"{_kind_of(returned)}; pass moe_ep.recompute_region"
    )


def check_waits(plan: Schedule) -> Schedule:
    """The plan; its waits must be ones that stages make.

    Raises:
        ProtocolError: a wait that no stage makes, so that it would be left out without a word.
    """
    strange = frozenset().union(*plan.links) - ALL_WAITS
    if strange:
        pairs = ", ".join(f"{waits} for {awaited}" for waits, awaited in sorted(strange))
        raise ProtocolError(f"the schedule has waits that no stage makes: {pairs}")
    return plan


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{len(value)} of them" if isinstance(value, tuple | list) else type(value).__name__
