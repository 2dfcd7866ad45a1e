"""What a training step does with all MoE layers of a model: their losses, and once a step their loads and biases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import InputError, RecipeError
from .flights import MoEAux
from .layer import MoELayer
from .router import SigmoidRouter


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model in module order, also inside wrappers (compiled, checkpointed, sharded)."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def check_layer_indices(model: nn.Module) -> None:
    """Refuse layers with the same number: their experts and routers would begin with equal weights.

    Raises:
        RecipeError: two layers of the model have one layer_index.
    """
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            index = module.layer_index
            if index in first:
                raise RecipeError(
                    f"{first[index]} and {name} both have layer_index = {index}, so their initial weights are equal "
                    "and no message tells them apart; build each MoELayer of a model with a layer_index of its own"
                )
            first[index] = name


@torch.no_grad()
def update_routers(model: nn.Module, group: dist.ProcessGroup | None) -> Tensor:
    """Once per optimizer step, before it: global loads, selection biases, faults noted on the device. Collective.

    Args:
        model: its MoE layers have run forward (and backward) on this step's micro-batches.
        group: all ranks that train the model, data-parallel ones too; None: this rank alone.

    Returns:
        int64 [layers, E], routes of the global batch to each expert; the counters start again at zero.

    Raises:
        RecipeError: two layers of the model have one layer_index.
        InputError, CapacityError, NonFiniteError: a fault that a run without host syncs noted on the device.
        ProtocolError: a micro-batch still holds slots of replicas.
    """
    check_layer_indices(model)
    layers = moe_layers(model)
    check_ended(layers)
    if not layers:
        return torch.zeros((0, 0), dtype=torch.int64)
    loads = torch.stack([layer.router.take_load() for layer in layers])
    if group is not None and group.size() > 1:
        dist.all_reduce(loads, group=group)
    update_biases(layers, loads)
    return loads


def check_ended(layers: Sequence[MoELayer]) -> None:
    """Refuse to go on behind a fault noted on the device, or with slots of replicas not given back. Collective.

    Raises:
        InputError, CapacityError, NonFiniteError: the fault.
        ProtocolError: a micro-batch still holds slots.
    """
    # in the order of the layers on every rank: reading the faults of a dispatcher is a collective
    for dispatcher in dict.fromkeys(layer.dispatcher for layer in layers):
        dispatcher.raise_if_faulted()
    for replicas in dict.fromkeys(layer.replicas for layer in layers if layer.replicas is not None):
        replicas.check_returned()


def update_biases(layers: Sequence[MoELayer], loads: Iterable[Tensor]) -> None:
    """Selection biases, where there are some that move, from each layer's load [E] of the global batch."""
    for layer, load_E in zip(layers, loads, strict=True):
        if isinstance(layer.router, SigmoidRouter) and layer.config.bias_update_rate > 0:
            layer.router.update_bias(load_E)


def total_aux_loss(auxes: list[MoEAux]) -> Tensor:
    """Sum over layers of the differentiable losses of one micro-batch, float32 []; no graph where all are off.

    Raises:
        InputError: not the list of one micro-batch.
    """
    if isinstance(auxes, MoEAux) or any(not isinstance(aux, MoEAux) for aux in auxes):
        kind = "one MoEAux" if isinstance(auxes, MoEAux) else f"a list of {type(auxes[0]).__name__}"
        raise InputError(
            f"auxes must list the MoEAux of every layer for one micro-batch, got {kind}; pass [aux] for a single "
            "layer, and call it for each micro-batch of a DominoStack by itself"
        )
    return torch.stack([aux.loss for aux in auxes]).sum() if auxes else torch.zeros(())
