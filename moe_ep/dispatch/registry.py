"""Dispatchers by name: ours, registered ones, and third-party ones by entry point.

A third-party package declares its dispatcher in the entry-point group `moe_ep.dispatchers`; the group is read only when
a name is asked for, and nothing is imported before it is chosen.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

import torch
import torch.distributed as dist

from ..alarm_registry import close_alarm
from ..config import DispatchConfig
from ..debug import debug
from ..errors import MoEError, RecipeError, Unavailable
from ..ops import kernel_reasons
from ..order import close_order
from ..schema import nearest
from ..streams import forget_streams
from .agreement import agree, check_group
from .base import Dispatcher
from .capabilities import capability_reasons
from .twin import close_twins

ENTRY_POINTS = "moe_ep.dispatchers"
_BUILT_IN = {
    "local": ".local",
    "all2all": ".all2all",
    "agrs": ".agrs",
    "deepep": ".deepep",
    "nccl_ep": ".nccl_ep",
    "direct": ".direct",
}
_classes: dict[str, type[Dispatcher]] = {}
_adopted: set[str] = set()  # names whose entry point has been loaded
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
    if name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name], __package__)
    elif points:
        _adopt(name, points[0])
    if name not in _classes:
        raise RecipeError(f"unknown dispatcher {name!r}; {nearest(name, known_dispatchers())}")
    return _classes[name]


def _adopt(name: str, point: importlib.metadata.EntryPoint) -> None:
    """Load an entry point once; what was registered in this process under its name must be the same class."""
    if name in _adopted:
        return
    cls = _load(point)
    other = _classes.setdefault(name, cls)
    if other is not cls:
        raise RecipeError(
            f"dispatcher {name!r} is claimed by {_owner(point)} and by {other.__module__}.{other.__qualname__}, which "
            "was registered in this process; rename one of them"
        )
    _adopted.add(name)


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
    check_group(group)
    try:
        cls = find_dispatcher(config.name)
    except (RecipeError, Unavailable) as err:
        return [str(err)]
    num_ranks = 1 if group is None else group.size()
    reasons = [
        *capability_reasons(cls.capabilities, config, num_ranks),
        *cls.unavailable_reasons(config, group),
        *kernel_reasons(config, group),
    ]
    return list(dict.fromkeys(reasons))


def refusal(config: DispatchConfig, group: dist.ProcessGroup | None) -> MoEError | None:
    """The error that `build_dispatcher` would raise on this rank, None where it can run."""
    try:
        debug()
    except RecipeError as err:
        return err
    reasons = unavailable_reasons(config, group)
    if not reasons:
        return None
    kind = Unavailable if config.name in known_dispatchers() else RecipeError
    return kind(f"dispatcher {config.name!r} cannot run here: {'; '.join(reasons)}")


def versions() -> dict[str, str]:
    """What ranks that exchange rows must have alike, whichever the back end: no message says how it is laid out."""
    from .. import __version__

    try:
        from ..kernels.build import source_hash
    except ModuleNotFoundError:  # a checkout on the path instead of an installation: torch moves the rows
        return {"moe_ep": __version__, "its kernels": "not installed", "torch": torch.__version__}
    return {"moe_ep": __version__, "its kernels": source_hash(), "torch": torch.__version__}


def build_dispatcher(config: DispatchConfig, group: dist.ProcessGroup | None = None) -> Dispatcher:
    """The dispatcher of (configuration, group), shared by all layers that ask for it. Collective over the group.

    Args:
        config: equal on all ranks.
        group: the expert-parallel group; None: one rank, no process group needed and no collective made.

    Raises:
        RecipeError: no such dispatcher; the message has the nearest name.
        Unavailable: this rank cannot run it, with every reason and the way out.
        PeerError: the ranks disagree about the configuration, or another one cannot run it; no rank is left waiting.
    """
    key = (config, group)
    if key not in _built or _built[key].closed:
        values = {**asdict(config), "MOE_EP_DEBUG": os.environ.get("MOE_EP_DEBUG") == "1", **versions()}
        agree("the dispatcher", values, refusal(config, group), group)
        _built[key] = _classes[config.name](config, group)  # found: nobody has refused
    return _built[key]


def close_dispatchers(group: dist.ProcessGroup | None = None) -> None:
    """Close and forget the dispatchers of a group (None: those without one). Call it before the group is destroyed."""
    for key in [key for key in _built if key[1] is group]:
        dispatcher = _built.pop(key)
        for companion in dispatcher.companions.values():
            companion.close()
        dispatcher.close()
    close_alarm(group)
    closed = [twin for twin in close_twins(group) if twin is not group]
    for twin in closed:
        forget_streams(twin)
    close_order(group, *closed)
