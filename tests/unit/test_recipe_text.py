"""A resolved recipe is read back to the same recipe, whatever its texts hold."""

from __future__ import annotations

import dataclasses
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recipes.files import replace_text
from recipes.options import toml_text
from recipes.recipe import Recipe, load_recipe, to_toml
from recipes.sections import RunSection
from tests.ranks.small_recipe import write

NASTY = "tab\t \"quotes\" '''back\\slash\\u0041 \x00\x07\x1b\x7f\x85\u2028 \r\n end = [1] # \U0001f600"
TEXT = st.text()
NAMES = st.text(min_size=1, max_size=40).filter(
    lambda t: t.isprintable() and t not in (".", "..") and not set(t) & {*"/\\"}
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def read_back(recipe: Recipe, folder: Path) -> Recipe:
    path = folder / "recipe.toml"
    replace_text(path, to_toml(recipe))
    return load_recipe(path)


@given(TEXT)
@example(NASTY)
def test_any_text_is_a_toml_string(text: str) -> None:
    assert tomllib.loads(f"a = {toml_text(text)}") == {"a": text}


@given(name=NAMES, place=TEXT, path=TEXT, key=TEXT, value=TEXT)
@example(name="\U0001f600 \u00e9 b=c", place=NASTY, path=NASTY, key=NASTY, value=NASTY)
def test_any_recipe_is_read_back(folder: Path, name: str, place: str, path: str, key: str, value: str) -> None:
    recipe = load_recipe(write(folder))
    changed = dataclasses.replace(
        recipe,
        run=RunSection(name=name, dir=place or "runs"),
        data=dataclasses.replace(recipe.data, path=path or None),
        checkpoint=dataclasses.replace(recipe.checkpoint, resume=path or "auto"),
        options={"all2all": ((key, (value, 1, True, 0.5)),)},
    )
    again = read_back(changed, folder)
    assert again.flat() == changed.flat()
    assert dataclasses.replace(again, source=changed.source) == changed


def test_a_smiling_run_resumes_from_its_own_recipe(folder: Path) -> None:
    recipe = load_recipe(write(folder), ["run.name=\U0001f600"])
    assert read_back(recipe, folder).run.name == "\U0001f600"
    assert "\\u" not in to_toml(recipe)
