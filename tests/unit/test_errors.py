"""Errors of the package: one base, and the built-in class that a caller may already catch."""

from __future__ import annotations

import inspect

import pytest

from moe_ep import errors

KINDS = {
    "RecipeError": ValueError,
    "InputError": ValueError,
    "PlanError": ValueError,
    "Unavailable": RuntimeError,
    "ProtocolError": RuntimeError,
    "CapacityError": RuntimeError,
    "NonFiniteError": RuntimeError,
    "PeerError": RuntimeError,
    "CheckpointError": RuntimeError,
}


def test_the_classes_are_these() -> None:
    defined = {name for name, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__}
    assert defined == {"MoEError", *KINDS}


@pytest.mark.parametrize(("name", "built_in"), KINDS.items())
def test_each_is_caught_by_the_base_and_by_the_built_in_class(name: str, built_in: type[Exception]) -> None:
    for wanted in (errors.MoEError, built_in):
        with pytest.raises(wanted, match="top_k = 9"):
            raise getattr(errors, name)("top_k = 9 is larger than num_experts = 8")


@pytest.mark.parametrize("name", KINDS)
def test_kinds_do_not_shadow_each_other(name: str) -> None:
    others = [getattr(errors, other) for other in KINDS if other != name]
    assert not any(issubclass(getattr(errors, name), other) for other in others)
