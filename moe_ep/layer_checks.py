"""What a caller hands to a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import MoEConfig
from .errors import InputError, RecipeError


def check_layer_index(layer_index: object) -> None:
    """Refuse what is no number, and a number that ranks cannot tell each other (`faults.place_of`).

    Raises:
        RecipeError: it is no int, or does not lie in [0, 65536).
    """
    if not isinstance(layer_index, int) or not 0 <= layer_index < 1 << 16:
        raise RecipeError(
            f"layer_index must be an int in [0, 65536), got {layer_index!r}; number the layers of a model from 0"
        )


def check_config(config: object) -> None:
    """Refuse what is no MoEConfig, a dict of its fields too.

    Raises:
        RecipeError: with the type met.
    """
    if not isinstance(config, MoEConfig):
        raise RecipeError(
            f"config must be a MoEConfig, got {type(config).__name__}; write MoEConfig(hidden_size=..., ...)"
        )


def check_shapes(x: object, valid: object, hidden_size: int) -> None:
    """Refuse an x that is not [..., H], and a mask that is not [...].

    Raises:
        InputError: shape or kind.
    """
    shape = _shape_of(x)
    if not shape or shape[-1] != hidden_size:
        raise InputError(f"x must be [..., {hidden_size}] (hidden_size), got {shape}")
    if valid is not None and _shape_of(valid) != shape[:-1]:
        raise InputError(f"valid must be {shape[:-1]}, as x without H, got {_shape_of(valid)}")


def _shape_of(x: object) -> tuple[int, ...]:
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x and valid must be dense tensors, got {kind}")
    return tuple(x.shape)
