"""Dataclasses as schemas: tables and keyword arguments held against fields and annotations, strictly.

Unknown keys, wrong types and values outside a closed choice are refused, and what would be valid is named. The sections
of a recipe are built here, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from .errors import RecipeError

C = TypeVar("C")


def require(condition: bool, message: str) -> None:
    """Raise RecipeError(message) unless the condition holds."""
    if not condition:
        raise RecipeError(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that lists the known names, with the nearest one first where one is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse the first key that is not known.

    Raises:
        RecipeError: the key, the nearest known one, and all that are known.
    """
    names = set(known)
    for key in given:
        if key not in names:
            raise RecipeError(f"{where}: unknown key {key!r}; {nearest(str(key), names)}")


def known_keywords(cls: type[C]) -> type[C]:
    """Class decorator of a dataclass: an unknown keyword is a RecipeError that names the nearest known one."""
    init: Any = cls.__init__
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        check_keys(keywords, names, cls.__name__)
        init(self, *args, **keywords)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


def from_mapping(cls: type[C], table: Mapping[str, Any], where: str) -> C:
    """Build the dataclass `cls` from a table, strictly.

    Args:
        cls: a dataclass whose fields are str, int, float, bool, tuple, Literal, or any of them | None.
        table: keys and values as TOML gives them. An int is accepted for a float, never the other way round.
        where: what a message starts with, such as "recipes/tiny.toml [moe]".

    Raises:
        RecipeError: unknown key (with the nearest known one), missing key, wrong type, value outside a Literal.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    check_keys(table, fields, where)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        require(not required or name in table, f"{where}: key {name!r} is missing; it has no default")
    values = {key: coerce(value, hints[key], f"{where}.{key}") for key, value in table.items()}
    try:
        return cls(**values)
    except RecipeError as err:
        raise RecipeError(f"{where}: {err}") from err


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Check one value against a type hint; RecipeError with value and what would be valid."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        require(value in choices, f"{where} = {value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if origin in (typing.Union, types.UnionType):
        options = [h for h in typing.get_args(hint) if h is not type(None)]
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _coerce_any(value, options, where)
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{where} = {value!r} must be a list")
        return tuple(value)
    if type(value) is int:
        require(-(2**63) <= value < 2**63, f"{where} = {value} does not fit into 64 bits")
        value = float(value) if hint is float else value
    if hint is Any or (isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)):
        return value
    raise RecipeError(f"{where} = {value!r} must be {hint.__name__}, got {type(value).__name__}{_way_out(value, hint)}")


def _way_out(value: Any, hint: Any) -> str:
    """What to write in place of a value of a type that PyTorch users often try; empty where the type says it."""
    if dataclasses.is_dataclass(hint):
        return f"; give a dict of its fields: {', '.join(f.name for f in dataclasses.fields(hint))}"
    if hint is str and type(value).__module__ == "torch" and str(value).startswith("torch."):
        return f"; write its name, {str(value).removeprefix('torch.')!r}"
    return ""


def _coerce_any(value: Any, options: list[Any], where: str) -> Any:
    errors = []
    for hint in options:
        try:
            return coerce(value, hint, where)
        except RecipeError as err:
            errors.append(str(err))
    raise RecipeError("; or ".join(errors))


def check_types(config: Any) -> None:
    """Hold every field of a dataclass against its annotation, as `from_mapping` does for a table.

    Raises:
        RecipeError: wrong type, or a value outside a Literal.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        coerce(getattr(config, field.name), hints[field.name], field.name)
