"""Commands of the documents that train, one after the other as a reader runs them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from recipes.recipe import load_recipe

ROOT = Path(__file__).parents[2]
TRAINS = re.compile(
    r"^    (?:.*recipes/pretrain\.py recipes/tiny\.toml|tools/demo)(?P<overrides>(?: [\w.]+=\S+)+)", re.M
)


@pytest.mark.parametrize(("page", "fewest"), [("README.md", 4), ("docs/write_a_dispatcher.md", 1)])
def test_other_values_than_those_of_the_demo_have_a_run_of_their_own(page: str, fewest: int) -> None:
    """The demo is finished by then: without another name they would resume it, and train nothing."""
    found = [match["overrides"].split() for match in TRAINS.finditer((ROOT / page).read_text())]
    assert len(found) >= fewest
    for overrides in found:
        assert any(re.fullmatch(r"run\.name=(?!tiny$)\S+", override) for override in overrides), overrides


def training_commands(text: str) -> list[list[str]]:
    """Recipe and overrides of each indented command that trains; `tools/demo` takes the small recipe."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    commands = [
        shlex.split(line, comments=True) for line in lines if re.match(r" {4}(tools/demo|.*torchrun .*)\b", line)
    ]
    found = []
    for words in commands:
        if words[0] == "tools/demo":
            found.append(["recipes/tiny.toml", *words[1:]])
        elif "recipes/pretrain.py" in words:
            found.append(words[words.index("recipes/pretrain.py") + 1 :])
    return found


def test_every_training_command_of_the_readme_is_a_recipe_that_is_not_refused() -> None:
    found = training_commands((ROOT / "README.md").read_text())
    assert len(found) >= 8
    for recipe, *overrides in found:
        load_recipe(ROOT / recipe, overrides)


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "    tools/demo a.b=1   # c\n    torchrun --x 2 recipes/pretrain.py r.toml \\\n        'a.b=[1,2]'\n"
    assert training_commands(text) == [["recipes/tiny.toml", "a.b=1"], ["r.toml", "a.b=[1,2]"]]
