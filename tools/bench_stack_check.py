"""Whether a stack's variants computed the right thing: each layer against float64, all variants against each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bench_check import (
    LAYER_SAMPLES,
    STAGE_SAMPLES,
    Check,
    LayerSample,
    check_layer,
    compare,
    layer_tolerance,
    merge_checks,
    sample_tokens,
)
from .bench_setting import Setting
from .bench_stack import BenchStack, Piece

Seen = tuple[Tensor, Tensor, Tensor]  # x, h, n of a layer and a piece
_GRAD_SAMPLES = 4096


def check_stack(
    stack: BenchStack, pieces: Sequence[Piece], seen: Sequence[Sequence[Seen]], ys: Sequence[Tensor], *, backward: bool
) -> Check:
    """Hold every MoE layer's output and input gradient, for what went into it, against float64 experts. Collective.

    Attention and norms are torch's own and stand in no reference; what they make of an error is not asked.

    Args:
        stack: the layers.
        pieces: micro-batches in the order in which they ran.
        seen: of each layer, of each piece; the tensors of a backward keep their gradients.
        ys: outputs of each piece, with their gradients.
        backward: whether there was one.
    """
    setting, found = stack.setting, []
    for number, layer in enumerate(stack.layers):
        for i, piece in enumerate(pieces):
            _, h, n = seen[number][i]
            y = ys[i] if number + 1 == len(stack.layers) else seen[number + 1][i][0]
            tokens = sample_tokens(len(y), LAYER_SAMPLES, y.device)
            y_n = y.detach()[tokens].double()
            sample = LayerSample(
                x=n.detach()[tokens],
                dy=_gradient(y)[tokens] if backward else torch.zeros_like(y[tokens]),
                ids=piece.ids[tokens],
                y=y_n - h.detach()[tokens].double(),
                dx=_gradient(n)[tokens] if backward else None,
                y_error=y_n.norm(dim=1) * torch.finfo(setting.dtype).eps / 2,
            )
            found.append(check_layer(layer.moe, stack.routers[number], setting, sample))
    return merge_checks(found)


def _gradient(tensor: Tensor) -> Tensor:
    """Zero where the graph was cut, which is then found to be wrong."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def same_rows(pairs: Sequence[tuple[Tensor, Tensor]], setting: Setting) -> Check:
    """Hold sampled rows of what was timed against those of a run that was looked into."""
    sampled = []
    for got, want in pairs:
        tokens = sample_tokens(len(got), STAGE_SAMPLES, got.device)
        sampled.append((got[tokens], want[tokens].double()))
    return compare(sampled, layer_tolerance(setting))


def sample_gradients(stack: BenchStack) -> dict[str, Tensor]:
    """Evenly spaced values of every parameter's gradient, float64 [1, n]."""
    found = {}
    for name, parameter in stack.parameters():
        if parameter.grad is not None:
            flat = parameter.grad.reshape(-1)
            found[name] = flat[:: -(-flat.numel() // _GRAD_SAMPLES)].double().view(1, -1)
    return found


def same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], setting: Setting) -> Check:
    """Hold the gradients of one variant's parameters against another's, which adds up in another order."""
    return compare([(got[name], want[name]) for name in want], layer_tolerance(setting))
