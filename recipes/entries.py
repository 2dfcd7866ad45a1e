"""Names and tensors of everything that a run must get back, under names that do not depend on the number of ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.optim import OwnedParameter, ShardedAdamW
from recipes.parallel import expert_names
from recipes.ranks import Ranks


class Entries:
    """Names and tensors of everything a run must get back, under names that do not depend on the number of ranks.

    Attributes:
        tensors: this rank's part; tensors share the run's memory, so that loading fills them in place.
        shapes: name -> shape of the whole tensor, over all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: ShardedAdamW, ranks: Ranks, num_experts: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        experts = expert_names(model)
        for index, owned in enumerate(optimizer.params):
            parts = {"model": optimizer.masters[index], **optimizer.moments(index)}
            for prefix, shard in parts.items():
                if owned.name in experts:
                    self._add_experts(prefix, owned, shard, ranks, num_experts)
                else:
                    self._add(f"{prefix}.{owned.name}", _whole(owned.param, shard))
        parameters = {name for name, _ in model.named_parameters()}
        for name, buffer in model.state_dict().items():
            if name not in parameters:
                self._add(f"model.{name}", buffer)

    def _add(self, key: str, tensor: Tensor) -> None:
        self.tensors[key] = tensor
        self.shapes[key] = tuple(tensor.shape)

    def _add_experts(self, prefix: str, owned: OwnedParameter, shard: Tensor, ranks: Ranks, num_experts: int) -> None:
        layer, _, leaf = owned.name.rpartition(".")
        first = ranks.ep_rank * (num_experts // ranks.ep_size) + _first_row(owned.param)
        for expert in range(num_experts):
            self.shapes[f"{prefix}.{layer}.{expert}.{leaf}"] = tuple(shard.shape[1:])
        for row in range(shard.shape[0]):
            self.tensors[f"{prefix}.{layer}.{first + row}.{leaf}"] = shard[row]


def _whole(param: nn.Parameter, shard: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return shard
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _first_row(param: nn.Parameter) -> int:
    """First row of a shard along dimension 0; FSDP2 deals rows as `torch.chunk` does."""
    if not isinstance(param, DTensor):
        return 0
    rows, ranks = param.shape[0], param.device_mesh.size()
    return min(rows, param.device_mesh.get_local_rank() * -(-rows // ranks))
