"""Dispatchers by name: ours, registered ones, and third-party ones by entry point.

A third-party package declares its dispatcher in the entry-point group `moe_ep.dispatchers`; the group is read only when
a name is asked for, and nothing is imported before it is chosen.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from ..config import DispatchConfig, nearest
from ..errors import PeerError, RecipeError, Unavailable
from .base import Dispatcher
from .capabilities import capability_reasons

ENTRY_POINTS = "moe_ep.dispatchers"
_BUILT_IN = {"local": ".local", "all2all": ".all2all", "agrs": ".agrs"}
_classes: dict[str, type[Dispatcher]] = {}
_built: dict[tuple[DispatchConfig, dist.ProcessGroup | None], Dispatcher] = {}
D = TypeVar("D", bound=type[Dispatcher])


def register_dispatcher(name: str) -> Callable[[D], D]:
    """Class decorator that makes a dispatcher known under `name`.

    Raises:
        RecipeError: the name is taken by another class.
    """

    def register(cls: D) -> D:
        other = _classes.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RecipeError(
                f"dispatcher name {name!r} is taken by {other.__module__}.{other.__qualname__}; "
                f"register {cls.__module__}.{cls.__qualname__} under another name"
            )
        _classes[name] = cls
        return cls

    return register


def _entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, []).append(point)
    return found


def known_dispatchers() -> list[str]:
    """Every name that `find_dispatcher` takes, without importing any of them."""
    return sorted({*_BUILT_IN, *_classes, *_entry_points()})


def find_dispatcher(name: str) -> type[Dispatcher]:
    """The class of a name, imported now if need be.

    Raises:
        RecipeError: unknown name, with the nearest known one; or a name that two distributions claim.
        Unavailable: its module cannot be imported.
    """
    points = _entry_points().get(name, [])
    owners = sorted({_owner(point) for point in points} | ({"moe_ep itself"} if name in _BUILT_IN else set()))
    if len(owners) > 1:
        raise RecipeError(f"dispatcher {name!r} is claimed by {' and by '.join(owners)}; uninstall one of them")
    if name not in _classes:
        if name in _BUILT_IN:
            importlib.import_module(_BUILT_IN[name], __package__)
        elif points:
            _classes[name] = _load(points[0])
        else:
            raise RecipeError(f"unknown dispatcher {name!r}; {nearest(name, known_dispatchers())}")
    return _classes[name]


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _load(point: importlib.metadata.EntryPoint) -> type[Dispatcher]:
    try:
        cls = point.load()
    except Exception as err:
        raise Unavailable(f"dispatcher {point.name!r} of {_owner(point)} cannot be imported: {err}") from err
    if not (isinstance(cls, type) and issubclass(cls, Dispatcher)):
        raise RecipeError(f"dispatcher {point.name!r} of {_owner(point)} is {cls!r}, not a subclass of Dispatcher")
    return cls


def unavailable_reasons(config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
    """Sentences that say why a configuration cannot run on this rank. Empty: it can."""
    try:
        cls = find_dispatcher(config.name)
    except (RecipeError, Unavailable) as err:
        return [str(err)]
    num_ranks = 1 if group is None else group.size()
    return capability_reasons(cls.capabilities, config, num_ranks) or cls.unavailable_reasons(config, group)


def build_dispatcher(config: DispatchConfig, group: dist.ProcessGroup | None = None) -> Dispatcher:
    """The dispatcher of (configuration, group), shared by all layers that ask for it. Collective over the group.

    Args:
        config: equal on all ranks.
        group: the expert-parallel group; None: one rank, no process group needed and no collective made.

    Raises:
        RecipeError: no such dispatcher; the message has the nearest name.
        Unavailable: some rank cannot run it; the same message on every rank.
        PeerError: the ranks disagree about the configuration; the message names the difference on every rank.
    """
    key = (config, group)
    if key not in _built:
        _agree(config, unavailable_reasons(config, group), group)
        _built[key] = find_dispatcher(config.name)(config, group)
    return _built[key]


def _agree(config: DispatchConfig, reasons: list[str], group: dist.ProcessGroup | None) -> None:
    """Every rank learns what every other one wants and cannot do, and raises the same."""
    mine: tuple[dict[str, Any], list[str]] = (asdict(config), reasons)
    everybody = [mine]
    if group is not None and group.size() > 1:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, mine, group=group)
        everybody = gathered
    first = everybody[0][0]
    differences = [
        f"{key} is {first[key]!r} on rank 0 and {other[key]!r} on rank {rank}"
        for rank, (other, _) in enumerate(everybody)
        for key in first
        if other[key] != first[key]
    ]
    if differences:
        raise PeerError(f"the ranks disagree about the dispatcher: {'; '.join(differences)}. Give all the same recipe")
    refused = [(rank, why) for rank, (_, why) in enumerate(everybody) if why]
    if refused:
        rank, why = refused[0]
        where = "" if len(everybody) == 1 or len(refused) == len(everybody) else f" on rank {rank}"
        error = Unavailable if config.name in known_dispatchers() else RecipeError
        raise error(f"dispatcher {config.name!r} cannot run{where}: {'; '.join(why)}")


def close_dispatchers(group: dist.ProcessGroup | None = None) -> None:
    """Close and forget the dispatchers of a group (None: those without one). Call it before the group is destroyed."""
    for key in [key for key in _built if key[1] is group]:
        _built.pop(key).close()
