"""Ranks and devices: what the launcher says, the process group, the (dp, ep) mesh, and how ranks agree on an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_ep.errors import MoEError, PeerError, RecipeError
from moe_ep.schema import require

_CIRCUMSTANCES = (OSError, ValueError, RuntimeError, MemoryError)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher says about this process (one rank where it was started without torchrun)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_env(cls) -> Launch:
        """Read torchrun's variables.

        Raises:
            RecipeError: one of them is no number, out of range, or missing beside the others.
        """
        world = _variable("WORLD_SIZE", 1, at_least=1)
        if world > 1:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                require(os.environ.get(name, "") != "", f"{name} is not set beside WORLD_SIZE = {world}; {_LAUNCH}")
            _variable("MASTER_PORT", 1, at_least=1, at_most=65535)
        local_world = _variable("LOCAL_WORLD_SIZE", 1, at_least=1, at_most=world)
        last_local = local_world - 1 if "LOCAL_WORLD_SIZE" in os.environ else None
        rank = _variable("RANK", 0, at_most=world - 1)
        return cls(rank, world, _variable("LOCAL_RANK", 0, at_most=last_local), local_world)


ALONE = Launch(0, 1, 0, 1)
_LAUNCH = "start all ranks with torchrun, or unset WORLD_SIZE for one rank"


def _variable(name: str, default: int, at_least: int = 0, at_most: int | None = None) -> int:
    """An environment variable that is a whole number."""
    text = os.environ.get(name, str(default))
    fits = text.isascii() and text.isdecimal() and at_least <= int(text) and (at_most is None or int(text) <= at_most)
    limit = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    require(fits, f"{name} = {text!r} must be a whole number {limit}; {_LAUNCH}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The running job. `mesh` (dp, ep) and `world` are None for one rank, which needs no process group.

    Rank r is number r % ep_size of its expert-parallel group and number r // ep_size of its data-parallel group.
    """

    rank: int
    world_size: int
    ep_size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    world: DeviceMesh | None = None

    @property
    def dp_size(self) -> int:
        """How many ranks hold the same experts."""
        return self.world_size // self.ep_size

    @property
    def ep_rank(self) -> int:
        """Which experts this rank holds: [ep_rank * L, (ep_rank + 1) * L)."""
        return self.rank % self.ep_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return None if self.world_size == 1 else dist.group.WORLD

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one set of experts; None where a rank holds all of them: no collective is needed."""
        return None if self.mesh is None or self.ep_size == 1 else self.mesh.get_group("ep")

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum in place over all ranks."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """One picklable value of every rank, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: Exception | None) -> None:
        """Raise the first rank's error on every rank, or nothing where no rank has one; a collective.

        Raises:
            MoEError: of the failing rank's own class. Of another class, such as an OSError, that rank raises a MoEError
                and all others a PeerError. `agreed` is set on it, so that not every rank needs to print it.
            Exception: on the failing rank, an error as it is that no circumstance explains: it needs its traceback.
        """
        kind = type(error) if isinstance(error, MoEError) else None
        texts = self.gather(None if error is None else (kind, f"{type(error).__name__}: {error}", str(error)))
        failures = [(rank, *text) for rank, text in enumerate(texts) if text is not None]
        if not failures:
            return
        rank, cls, named, text = failures[0]
        if cls is None:
            if rank == self.rank and error is not None and not isinstance(error, _CIRCUMSTANCES):
                raise error
            cls, text = MoEError if rank == self.rank else PeerError, f"rank {rank}: {named}"
        raise mark_agreed(cls(text)) from error

    def together(self, act: Callable[[], Any]) -> Any:
        """`act()`; an exception on any rank is raised on all of them (see `agree`)."""
        result, error = None, None
        try:
            result = act()
        except Exception as err:  # whatever it is, the others wait
            error = err
        self.agree(error)
        return result


def mark_agreed(error: Exception) -> Exception:
    """Say that every rank raises this very error."""
    error.agreed = True  # type: ignore[attr-defined]
    return error


def start(
    backend: Literal["auto", "gloo", "nccl"], ep_size: int, timeout_s: float, facts: dict[str, Any], source: str
) -> Ranks:
    """Choose the device, then start the process group and the mesh.

    Args:
        backend: of the recipe's [parallel].
        ep_size: must divide the world size.
        timeout_s: bound of every collective, seconds.
        facts: what must be equal on all ranks, compared before anything else depends on it.
        source: names the recipe in messages.

    Raises:
        RecipeError: "nccl" on a machine without a GPU for each of its ranks, or ranks that differ in `facts`.
    """
    launch = Launch.from_env()
    device = choose_device(backend, launch, source)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before any group exists, or NCCL guesses a device
    if launch.world_size == 1:
        return Ranks(0, 1, ep_size, device)
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if cuda else None,
    )
    everybody = Ranks(launch.rank, launch.world_size, ep_size, device)
    same_everywhere(everybody, {**facts, "device type": device.type, "torch": torch.__version__}, source)
    return over_process_group(ep_size, device)


def over_process_group(ep_size: int, device: torch.device) -> Ranks:
    """The mesh over all ranks of the default process group, which must exist; a collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (world_size // ep_size, ep_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    world = init_device_mesh(device.type, (world_size,), mesh_dim_names=("world",))
    return Ranks(rank, world_size, ep_size, device, mesh, world)


def choose_device(backend: str, launch: Launch, source: str) -> torch.device:
    """The device of this rank: LOCAL_RANK's GPU, or the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= launch.local_world_size
    require(
        backend != "nccl" or enough,
        f"{source} [parallel]: backend = 'nccl' needs a GPU for each of the {launch.local_world_size} rank(s) of this "
        f"machine, which has {gpus}; use 'gloo' for the CPU or 'auto'",
    )
    return torch.device("cuda", launch.local_rank) if enough and backend != "gloo" else torch.device("cpu")


def same_everywhere(ranks: Ranks, values: dict[str, Any], source: str) -> None:
    """Compare a flat table over all ranks; a collective.

    Raises:
        RecipeError: on every rank, naming every key that differs, its values and where they are.
    """
    tables = ranks.gather(values)
    keys = sorted(set().union(*tables))
    found = [_by_rank(key, [table.get(key) for table in tables]) for key in keys]
    if differences := [text for text in found if text]:
        raise mark_agreed(RecipeError(f"{source}: {'; '.join(differences)}; start all ranks alike"))


def _by_rank(key: str, values: list[Any]) -> str:
    """Such as: key is 1 on rank 0 and 2 on rank 1, 3. Empty where all are alike; the values need not be hashable."""
    others: list[tuple[Any, list[str]]] = []
    for rank, value in enumerate(values):
        if value == values[0]:
            continue
        known = next((ranks for other, ranks in others if other == value), None)
        if known is None:
            others.append((value, known := []))
        known.append(str(rank))
    parts = [f"{value!r} on rank {', '.join(ranks)}" for value, ranks in others]
    return " and ".join([f"{key} is {values[0]!r} on rank 0", *parts]) if parts else ""
