"""Tables `[moe.NAME]`: options that a recipe hands to one dispatcher, with a dispatcher of our own that has two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Capabilities, close_dispatchers, register_dispatcher, registry
from moe_ep.dispatch.local import Local
from moe_ep.errors import Unavailable
from recipes.build import build
from recipes.ranks import Ranks
from recipes.recipe import Recipe, load_recipe, to_toml
from tests.ranks.small_recipe import write

TABLES = """
[moe.fancy]
mode = "wide"
chunk = 64
[moe.all2all]
later = [1, 2.5]
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Iterator[Path]:
    @register_dispatcher("fancy")
    class Fancy(Local):
        name: ClassVar[str] = "fancy"
        capabilities: ClassVar[Capabilities] = Capabilities(options=("chunk", "mode"))

    path = write(tmp_path)
    text = (
        path.read_text().replace('path = "text"', f'path = "{tmp_path / "text"}"').replace("ep_size = 4", "ep_size = 1")
    )
    path.write_text(text + TABLES)
    yield path
    close_dispatchers(None)
    del registry._classes["fancy"]


def built(recipe: Recipe) -> DispatchConfig:
    return build(recipe, Ranks(0, 1, 1, torch.device("cpu"))).moe[0].dispatcher.config


def test_the_chosen_dispatcher_gets_its_options_sorted_and_no_others(recipe_file: Path) -> None:
    assert built(load_recipe(recipe_file, ["moe.dispatcher=fancy"])).options == (("chunk", 64), ("mode", "wide"))
    assert built(load_recipe(recipe_file, ["moe.dispatcher=local"])).options == ()


def test_an_override_reaches_an_option(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["moe.dispatcher=fancy", "moe.fancy.chunk=8"])
    assert built(recipe).options == (("chunk", 8), ("mode", "wide"))


def test_an_option_that_the_dispatcher_does_not_know_is_refused(recipe_file: Path) -> None:
    with pytest.raises(Unavailable, match=r"'fancy'.*knows no option 'chunks'; it knows chunk, mode"):
        built(load_recipe(recipe_file, ["moe.dispatcher=fancy", "moe.fancy.chunks=8"]))
    with pytest.raises(Unavailable, match=r"'all2all'.*knows no option 'later'; it knows none"):
        built(load_recipe(recipe_file))


def test_options_are_part_of_the_resolved_recipe_and_of_what_ranks_compare(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ['moe.fancy.mode="a \\"b\\" c"', "moe.fancy.on=true"])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(recipe))
    again = load_recipe(resolved)
    assert again.options == recipe.options
    assert again.options["all2all"] == (("later", (1, 2.5)),)
    assert again.options["fancy"] == (("chunk", 64), ("mode", 'a "b" c'), ("on", True))
    assert again.flat() == recipe.flat()
    assert recipe.flat()["moe.fancy.chunk"] == 64
