"""Tables `[moe.NAME]` of a recipe: keys that only the dispatcher NAME knows.

    [moe]
    dispatcher = "fancy"
    [moe.fancy]       # read because "fancy" is the dispatcher
    chunk = 64
    [moe.all2all]     # of another known dispatcher: kept for the day that it is chosen, and not looked into until then

A recipe can so hold the keys of several dispatchers, and one override (`moe.dispatcher=all2all`) switches between them.
Which keys a dispatcher takes, it says itself (`Capabilities.options`); it refuses the others when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_ep.dispatch import known_dispatchers
from moe_ep.errors import RecipeError
from moe_ep.schema import coerce, nearest, require

Options = tuple[tuple[str, Any], ...]


def take_options(moe: Any, known_keys: set[str], source: str) -> tuple[Any, dict[str, Options]]:
    """Split the section `[moe]` into its own keys and the tables of dispatchers, as sorted (key, value) pairs.

    Args:
        moe: the section as TOML gives it; what is no table is left for others to refuse.
        known_keys: of the section itself.
        source: what messages call the recipe.

    Raises:
        RecipeError: a table of an unknown dispatcher, or a value that is no number, text, truth value or list of them.
    """
    if not isinstance(moe, Mapping):
        return moe, {}
    tables = {name: table for name, table in moe.items() if isinstance(table, Mapping) and name not in known_keys}
    for name in tables:
        known = known_dispatchers()
        require(name in known, f"{source} [moe.{name}]: unknown dispatcher {name!r}; {nearest(name, known)}")
    found = {
        name: tuple((key, _plain(table[key], f"{source} [moe.{name}].{key}")) for key in sorted(table))
        for name, table in tables.items()
    }
    return {key: value for key, value in moe.items() if key not in tables}, found


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_plain(item, where) for item in value)
    if type(value) not in (bool, int, float, str):
        kind = type(value).__name__
        raise RecipeError(f"{where} = {value!r} must be a number, a text, true or false, or a list of them, got {kind}")
    return coerce(value, type(value), where)


def options_to_toml(options: Mapping[str, Options]) -> list[str]:
    """The tables as lines of TOML."""
    lines = []
    for name, pairs in options.items():
        lines += ["", f"[moe.{_key(name)}]", *(f"{_key(key)} = {toml_text(value)}" for key, value in pairs)]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def toml_text(value: Any) -> str:
    """A plain value, or a list of them, as TOML."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)  # repr of a float is TOML


def _quoted(text: str) -> str:
    """A basic string. JSON's escapes would not do: TOML has none for a half of a surrogate pair."""
    return '"' + re.sub(r'[\x00-\x1f"\\\x7f]', lambda found: f"\\u{ord(found[0]):04x}", text) + '"'
