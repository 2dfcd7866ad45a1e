"""Routed experts by name: those of this package, imported when their name is asked for, and those of others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from .config import MoEConfig
from .errors import RecipeError
from .experts import GroupedExperts
from .schema import nearest, require

X = TypeVar("X", bound=type[GroupedExperts])
_BUILT_IN = {
    "torch": ".torch_experts",
    "loop": ".loop_experts",
    "quack": ".quack_experts",
    "grouped_gemm": ".grouped_gemm_experts",
    "te": ".te_experts",
}  # modules that register a name, imported when it is asked for
_REGISTRY: dict[str, type[GroupedExperts]] = {}


def register_experts(name: str) -> Callable[[X], X]:
    """Class decorator: make a subclass of GroupedExperts known as `experts = "name"`.

    Raises:
        RecipeError: the name is taken.
    """

    def add(cls: X) -> X:
        known = _REGISTRY.get(name)
        own = cls.__module__ == f"{__package__}{_BUILT_IN.get(name, '')}"
        require(name not in _BUILT_IN or own, f"experts {name!r} are moe_ep's own; choose another name")
        require(known is None, f"experts {name!r} are already registered, as {known}; choose another name")
        _REGISTRY[name] = cls
        return cls

    return add


def known_experts() -> list[str]:
    """Every name that `build_experts` takes."""
    return sorted({*_REGISTRY, *_BUILT_IN})


def find_experts(name: str) -> type[GroupedExperts]:
    """The class of a name, imported now if need be.

    Raises:
        RecipeError: unknown name, with the nearest known one.
    """
    if name not in _REGISTRY and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name], __package__)
    cls = _REGISTRY.get(name)
    if cls is None:
        raise RecipeError(f"experts = {name!r} is not registered; {nearest(name, known_experts())}")
    return cls


def build_experts(config: MoEConfig, num_local: int, first_expert: int, layer_index: int) -> GroupedExperts:
    """The experts that `config.experts` names, initialised from seed 0.

    Raises:
        RecipeError: unknown name (with the nearest known one), or a range of experts outside num_experts.
        Unavailable: a configuration that these experts cannot compute, with a way out.
    """
    return find_experts(config.experts)(config, num_local, first_expert, layer_index)
