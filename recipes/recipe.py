"""A recipe: typed sections, read strictly from TOML plus `section.key=value` overrides.

Nothing here starts a process group or allocates: a recipe that can never work is refused before any training. What
needs the running job (is the dispatcher usable on this machine?) is asked when the model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ep.config import MoEConfig, ReplicaConfig
from moe_ep.dispatch import known_dispatchers
from moe_ep.errors import RecipeError
from moe_ep.experts_registry import known_experts
from moe_ep.schema import from_mapping, nearest, require
from recipes.data import VOCAB_SIZE
from recipes.model_config import ModelConfig
from recipes.options import Options, options_to_toml, take_options, toml_text
from recipes.recipe_tables import check_sections_known, override, read_tables
from recipes.sections import (
    CheckpointSection,
    DataSection,
    MetricsSection,
    MoESection,
    ParallelSection,
    RunSection,
    TrainSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All sections, as validated values. `source` is what messages call the recipe.

    `options` holds the keys of each dispatcher that has a table `[moe.NAME]`; only the chosen dispatcher's are used.
    """

    run: RunSection
    model: ModelConfig
    train: TrainSection
    moe: MoESection = field(default_factory=MoESection)
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data: DataSection = field(default_factory=DataSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    options: Mapping[str, Options] = field(default_factory=dict)
    source: str = "recipe"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.dir) / self.run.name

    def flat(self) -> dict[str, Any]:
        """`section.key` -> value."""
        tables = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        tables |= {f"moe.{name}": dict(pairs) for name, pairs in self.options.items()}
        return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}

    @property
    def has_moe(self) -> bool:
        """Whether any layer of the model is a mixture of experts."""
        return self.model.first_dense_layers < self.model.num_layers

    def moe_config(self) -> MoEConfig:
        """The configuration of every MoE layer: [moe] with the dispatcher's options, sizes of [model], micro-batches.

        Raises:
            RecipeError: an impossible combination, naming file, key and what would be valid.
        """
        tokens = self.train.micro_batch_size * self.train.sequence_length
        try:
            options = self.options.get(self.moe.dispatcher, ())
            return self.model.moe(
                **dataclasses.asdict(self.moe),
                max_tokens=tokens,
                num_micro_batches=self.train.intra_layer_micro_batch,
                options=options,
                replica=self.replica,
            )
        except RecipeError as err:
            raise RecipeError(f"{self.source} [moe]: {err}") from err


SECTIONS: dict[str, type] = {
    "run": RunSection,
    "model": ModelConfig,
    "moe": MoESection,
    "replica": ReplicaConfig,
    "parallel": ParallelSection,
    "train": TrainSection,
    "data": DataSection,
    "checkpoint": CheckpointSection,
    "metrics": MetricsSection,
}
_REQUIRED = ("run", "model", "train")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path: a TOML file.
        overrides: `section.key=value` strings; the value is read as TOML, and as a plain string where it is not TOML
            (`moe.dispatcher=agrs` needs no quotes).

    Raises:
        RecipeError: one message with file, key, value and what would be valid.
    """
    return recipe_of(read_tables(Path(path)), overrides, str(path))


def recipe_of(tables: dict[str, Any], overrides: Sequence[str], path: str) -> Recipe:
    """A recipe from the tables of `path`; see `load_recipe`."""
    check_sections_known(tables, SECTIONS, path)
    changed = [override(tables, text, path, SECTIONS) for text in overrides]
    sections = {}
    moe, options = take_options(tables.get("moe", {}), {key.name for key in dataclasses.fields(MoESection)}, path)
    if "moe" in tables:
        tables["moe"] = moe
    for name, cls in SECTIONS.items():
        if name in tables or name in _REQUIRED:
            origin = f"{path} (with command-line overrides)" if name in changed else path
            sections[name] = section_of(cls, tables.get(name, {}), f"{origin} [{name}]")
    recipe = Recipe(**sections, options=options, source=path)
    _check_sections(recipe)
    return recipe


def _check_sections(recipe: Recipe) -> None:
    """What two sections only say together."""
    vocab, mode = recipe.model.vocab_size, recipe.train.recompute
    require(
        vocab >= VOCAB_SIZE,
        f"{recipe.source} [model]: vocab_size = {vocab} must be at least {VOCAB_SIZE}: bytes and end of document",
    )
    recipe.moe_config()
    _check_names(recipe)
    slots, ranks = recipe.replica.slots, recipe.parallel.ep_size
    require(
        slots == 0 or (ranks > 1 and recipe.has_moe),
        f"{recipe.source} [replica]: slots = {slots} would have no effect with parallel.ep_size = {ranks} and "
        f"{recipe.model.num_layers - recipe.model.first_dense_layers} layers with experts: copies go to other ranks of "
        "an expert-parallel group; set slots = 0, or ep_size = 2 or more",
    )
    trace = recipe.metrics.trace_steps
    require(
        trace is None or trace[1] <= recipe.train.steps,
        f"{recipe.source} [metrics]: trace_steps = {list(trace or ())} ends after train.steps = {recipe.train.steps}; "
        "choose steps that the run has",
    )
    require(
        recipe.metrics.routing_trace is None or recipe.has_moe,
        f"{recipe.source} [metrics]: routing_trace has nothing to record: model.first_dense_layers = "
        f"{recipe.model.first_dense_layers} makes every layer dense; leave it out",
    )
    require(
        mode != "moe" or recipe.has_moe,
        f"{recipe.source} [train]: recompute = 'moe' matches no layer: model.first_dense_layers = "
        f"{recipe.model.first_dense_layers} makes every layer dense; use 'layer' or 'none'",
    )


def _check_names(recipe: Recipe) -> None:
    """Names are checked although no layer of the model may use them: it is a mistake all the same."""
    for key, known in (("dispatcher", known_dispatchers()), ("experts", known_experts())):
        name = getattr(recipe.moe, key)
        require(name in known, f"{recipe.source} [moe]: {key} = {name!r} is unknown; {nearest(name, known)}")


def section_of(cls: type, table: Any, where: str) -> Any:
    """One section as its dataclass; `where` starts a message.

    Raises:
        RecipeError: unknown key, wrong type, impossible value.
    """
    require(isinstance(table, Mapping), f"{where} = {table!r} must be a table")
    return from_mapping(cls, table, where)


def check_world(recipe: Recipe, world_size: int) -> None:
    """Refuse a recipe that this number of ranks cannot run.

    Raises:
        RecipeError: world size not divisible by ep_size, or experts not divisible by ep_size.
    """
    ep_size, experts = recipe.parallel.ep_size, recipe.model.num_experts
    key = f"{recipe.source} [parallel]: ep_size = {ep_size}"
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    if recipe.has_moe:
        divisors = [size for size in divisors if experts % size == 0]
    valid = f"valid with {world_size} rank(s): {', '.join(map(str, divisors))}"
    require(
        not recipe.has_moe or experts % ep_size == 0,
        f"{key} does not divide model.num_experts = {experts}; {valid}",
    )
    require(
        world_size % ep_size == 0,
        f"{key} does not divide the {world_size} rank(s) of this job; {valid}. Or start as many ranks as it takes: "
        f"torchrun --nproc-per-node {ep_size} ...",
    )


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out, as a recipe that `load_recipe` reads back to equal values."""
    lines = []
    for name in SECTIONS:
        lines.append(f"[{name}]")
        for key, value in dataclasses.asdict(getattr(recipe, name)).items():
            if value is None:
                lines.append(f"# {key} is unset")
            else:
                lines.append(f"{key} = {toml_text(value)}")
        if name == "moe":
            lines += options_to_toml(recipe.options)
        lines.append("")
    return "\n".join(lines)
