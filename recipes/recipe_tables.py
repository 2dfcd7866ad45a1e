"""The tables of a recipe before they are sections: read from TOML, changed by `section.key=value` overrides."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ep.errors import RecipeError
from moe_ep.schema import nearest, require


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        RecipeError: it cannot be read, or is no TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        where = "" if path.is_absolute() else f"; a relative path starts at the working directory, {Path.cwd()}"
        raise RecipeError(f"{path}: cannot read the recipe: {getattr(err, 'strerror', None) or err}{where}") from err
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise RecipeError(f"{path}: not valid TOML: {err}") from err
    return tables


def check_sections_known(tables: Mapping[str, Any], known: Mapping[str, type], path: str) -> None:
    """Refuse a table that is no section.

    Raises:
        RecipeError: with the nearest one.
    """
    for name in tables:
        require(name in known, f"{path}: unknown section [{name}]; {nearest(name, known)}")


def override(tables: dict[str, Any], text: str, path: str, sections: Mapping[str, type]) -> str:
    """Apply one `section.key=value` in place and return the section's name.

    Raises:
        RecipeError: it does not read so, or names no section or table.
    """
    unicode = not any("\ud800" <= letter <= "\udfff" for letter in text)  # what of the command line was no UTF-8
    require(unicode, f"{path}: override {text!a} is not UTF-8, which recipe.toml could not hold; use another name")
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    require(bool(equals and dot and name), f"{path}: override {text!r} must read section.key=value")
    where = f"{path}: override {text!r}"
    require(section in sections, f"{where}: unknown section {section!r}; {nearest(section, sections)}")
    table = tables.setdefault(section, {})
    require(isinstance(table, dict), f"{path}: [{section}] = {table!r} must be a table")
    *parents, name = name.split(".")  # moe.NAME.key is a key of the dispatcher NAME
    for parent in parents:
        table = table.setdefault(parent, {})
        require(isinstance(table, dict), f"{where}: {parent} = {table!r} must be a table")
    table[name] = _toml_value(value.strip())
    return section


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
