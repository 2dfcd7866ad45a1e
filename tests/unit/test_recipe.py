"""Recipes: what is read, what is overridden, and what is refused with which sentence."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from moe_ep.errors import RecipeError
from moe_ep.schema import from_mapping
from recipes.recipe import SECTIONS, check_world, load_recipe, to_toml
from recipes.sections import TrainSection
from tests.ranks.small_recipe import write

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("[!m]*.toml"))  # not Megatron's


@pytest.fixture
def path(tmp_path):
    return write(tmp_path)


def refusal(path, *overrides, world=None):
    with pytest.raises(RecipeError) as caught:
        recipe = load_recipe(path, overrides)
        assert world is not None, f"{overrides} was accepted"
        check_world(recipe, world)
    return str(caught.value)


def test_shipped_recipes_load_and_fit_their_ranks():
    ranks = {"tiny.toml": 4, "qwen3_moe_2gpu.toml": 2, "qwen3_moe_8gpu.toml": 8}
    assert {p.name for p in RECIPES} == set(ranks)
    for recipe in RECIPES:
        check_world(load_recipe(recipe), ranks[recipe.name])


def test_overrides_are_toml_values_and_bare_strings(path):
    recipe = load_recipe(
        path,
        [
            "moe.dispatcher=agrs",
            "train.lr=3e-4",
            "train.deterministic=true",
            'run.name="b=c"',
            "metrics.trace_steps=[2, 3]",
        ],
    )
    assert (recipe.moe.dispatcher, recipe.train.lr, recipe.train.deterministic) == ("agrs", 3e-4, True)
    assert (recipe.run.name, recipe.metrics.trace_steps) == ("b=c", (2, 3))


def test_an_override_may_open_a_section_that_the_file_lacks(path):
    assert load_recipe(path, ["replica.slots=0"]).replica.slots == 0


def test_resolved_recipe_reads_back_to_equal_values(path, tmp_path):
    recipe = load_recipe(path, ["train.lr=1e-05", "metrics.trace_steps=[2, 3]", 'data.path="a \\"b\\" \\\\ c"'])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(recipe))
    again = load_recipe(resolved)
    assert to_toml(again) == to_toml(recipe)
    assert again.data.path == 'a "b" \\ c'


def test_max_tokens_of_the_layer_is_one_micro_batch(path):
    assert load_recipe(path, ["train.micro_batch_size=3"]).moe_config().max_tokens == 3 * 16


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.stepz=3", ["[train]", "'stepz'", "did you mean 'steps'"]),
        ("trian.steps=3", ["'trian'", "did you mean 'train'"]),
        ("train.steps=0", ["[train]", "steps must be at least 1", "got 0; 1 is the fewest"]),
        ('train.steps="ten"', ["[train].steps", "'ten'", "must be int", "got str"]),
        ("train.steps=1.5", ["[train].steps", "must be int", "got float"]),
        ("train.deterministic=1", ["[train].deterministic", "must be bool"]),
        ("train.recompute=all", ["[train].recompute", "'all'", "'none', 'moe', 'layer'"]),
        ("train.lr=-1.0", ["[train]", "lr must be finite and above 0", "got -1.0"]),
        ("train.lr=nan", ["[train]", "lr must be finite and above 0", "got nan"]),
        ("train.min_lr=0.02", ["[train]", "min_lr = 0.02 must be at most lr = 0.01"]),
        ("train.timeout_s=inf", ["[train]", "timeout_s must be at least 1 and at most 604800 (seconds)", "got inf"]),
        ("train.timeout_s=0.5", ["timeout_s must be at least 1", "got 0.5"]),
        ("model.rope_theta=0.5", ["[model]", "rope_theta must be finite and at least 1", "got 0.5"]),
        ("model.rms_norm_eps=2.0", ["[model]", "rms_norm_eps must be at least 1e-12 and at most 1", "got 2.0"]),
        (
            "train.intra_layer_micro_batch=3",
            ["gradient_accumulation = 2", "choose 1 or 2, or a multiple of 3 for grad"],
        ),
        ("train.intra_layer_micro_batch=4", ["intra_layer_micro_batch = 4", "gradient_accumulation = 2"]),
        (
            "train.intra_layer_micro_batch=0",
            ["intra_layer_micro_batch must be at least 1", "got 0; 1 interleaves none"],
        ),
        ("replica.slots=-1", ["[replica]", "slots must not be negative, got -1"]),
        ("replica.planner=even", ["[replica].planner", "'even'", "'quota'", "'fixed_rows'"]),
        ("replica.min_quota=8", ["[replica]", "min_quota would have no effect with slots = 0"]),
        ("replica.transport=peer", ["[replica]", "transport would have no effect with slots = 0"]),
        ("replica.slot=1", ["[replica]", "unknown key 'slot'", "did you mean 'slots'"]),
        ("metrics.routing_trace=''", ["[metrics]", "routing_trace = ''", "must name a folder"]),
        ("metrics.record_step=3", ["[metrics]", "unknown key 'record_step'"]),
        ("metrics.trace_steps=[3, 2]", ["trace_steps = [3, 2]", "[first, last]"]),
        ("metrics.trace_steps=[1.5, 2]", ["trace_steps = [1.5, 2]"]),
        ("moe.fancy.api=v1", ["[moe.fancy]", "unknown dispatcher 'fancy'", "all2all"]),
        ("moe.all2al.api=v1", ["[moe.all2al]", "did you mean 'all2all'"]),
        ("moe.all2all.api={a = 1}", ["[moe.all2all].api = {'a': 1}", "must be a number, a text", "got dict"]),
        ("moe.all2all.api=[1, 2020-01-01]", ["[moe.all2all].api", "got date"]),
        ("moe.aux_loss_coef.api=1", ["aux_loss_coef = 0.01 must be a table"]),
        ("train.lr.api=1", ["lr = 0.01 must be a table"]),
        ("train.odd.api=1", ["[train]", "unknown key 'odd'"]),
        ("moe.router=softmx", ["[moe].router", "'softmx'", "'sigmoid'"]),
        ("moe.bias_update_rate=0.1", ["[moe]", "bias_update_rate = 0.1", "sigmoid"]),
        ("model.top_k=5", ["top_k = 5", "num_experts = 4"]),
        ("model.vocab_size=100", ["[model]", "vocab_size = 100", "257"]),
        ("parallel.backend=mpi", ["[parallel].backend", "'mpi'", "'gloo'"]),
        ("data.valid_fraction=1.0", ["[data]", "valid_fraction", "1.0"]),
        ("checkpoint.keep=0", ["[checkpoint]", "keep must be at least 1"]),
        ("run.name=a/b", ["[run]", "'a/b'", "one folder name"]),
        *[(f"run.name='{name}'", ["[run]", "must be one folder name"]) for name in ("", ".", "..", "a\\b", "a\tb")],
        ('run.name="a\\u0007b"', ["[run]", r"'a\x07b'", "printable"]),
        (f"run.name={chr(233) * 101}", ["[run]", "name has 202 bytes", "at most 200"]),
        ("run.name=caf\udce9", [r"'run.name=caf\udce9'", "is not UTF-8"]),
        ("run.dir=''", ["[run]", "dir = ''", "'.' is the working directory"]),
        ("data.path=''", ["[data]", "path = ''", "'.' is the working directory"]),
        ("checkpoint.resume=''", ["[checkpoint]", "resume = ''"]),
        ("train.warmup_steps=7", ["[train]", "warmup_steps = 7 must be at most steps = 6"]),
        ("metrics.trace_steps=[200, 300]", ["[metrics]", "trace_steps = [200, 300] ends after train.steps = 6"]),
        ("metrics.trace_steps=[6, 7]", ["[metrics]", "trace_steps = [6, 7] ends after train.steps = 6"]),
        ("moe.dispatcher=nonsense", ["[moe]", "dispatcher = 'nonsense' is unknown", "all2all"]),
        ("moe.experts=tourch", ["[moe]", "experts = 'tourch' is unknown", "did you mean 'torch'"]),
        ("model.intermediate_size=8", ["[model]", "intermediate_size = 8", "first_dense_layers = 0"]),
        ("model.intermediate_size=-8", ["[model]", "intermediate_size = -8", "first_dense_layers = 0"]),
        ("train=3", ["'train=3'", "section.key=value"]),
        ("steps=3", ["'steps=3'", "section.key=value"]),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence_with_file_key_value_and_way_out(path, override, parts):
    message = refusal(path, override)
    assert str(path) in message
    assert "\n" not in message
    for part in parts:
        assert part in message


FLOATS = [
    f"{section}.{name}"
    for section, cls in SECTIONS.items()
    for name, hint in typing.get_type_hints(cls).items()
    if hint is float or float in typing.get_args(hint)
]


TEXTS = [
    f"{section}.{name}"
    for section, cls in SECTIONS.items()
    for name, hint in typing.get_type_hints(cls).items()
    if hint is str or (str in typing.get_args(hint) and type(None) in typing.get_args(hint))
]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1.0"])
@pytest.mark.parametrize("key", FLOATS)
def test_no_number_of_any_section_may_be_infinite_negative_or_none(path, key, value):
    message = refusal(path, f"{key}={value}", "moe.router=sigmoid")
    assert f"{key.partition('.')[2]} must be " in message
    assert message.endswith(f"got {float(value)}")


def test_the_keys_that_hold_numbers_are_seen():
    assert {"train.lr", "moe.capacity_factor", "model.init_std", "data.valid_fraction"} <= set(FLOATS)


def test_recompute_of_moe_layers_needs_moe_layers(path):
    message = refusal(path, "train.recompute=moe", "model.first_dense_layers=2", "model.intermediate_size=8")
    assert "recompute = 'moe' matches no layer" in message


@pytest.mark.parametrize("key", ["dispatcher", "experts"])
def test_names_are_checked_where_no_layer_uses_them(path, key):
    dense = ("model.first_dense_layers=2", "model.intermediate_size=8")
    assert "routing_trace has nothing to record" in refusal(path, "metrics.routing_trace=x", *dense)
    load_recipe(path, dense)
    assert f"{key} = 'nonsense' is unknown" in refusal(path, *dense, f"moe.{key}=nonsense")


@pytest.mark.parametrize("key", TEXTS)
def test_no_text_of_any_section_may_be_empty(path, key):
    assert "''" in refusal(path, f'{key}=""')


def test_a_missing_key_and_a_missing_section(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text('[run]\nname = "a"\n')
    assert "[model]: key 'vocab_size' is missing" in refusal(path)


def test_a_section_that_is_no_table(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text("run = 3\n")
    assert "[run] = 3 must be a table" in refusal(path)


def test_not_toml_not_there_not_text(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\n")
    assert "not valid TOML" in refusal(bad)
    assert "No such file" in refusal(tmp_path / "absent.toml")
    bad.write_bytes(b"\xff\xfe")
    assert "cannot read the recipe" in refusal(bad)


@pytest.mark.parametrize(
    ("world", "ep_size", "part"),
    [
        (3, 2, "does not divide the 3 rank(s) of this job; valid with 3 rank(s): 1"),
        (2, 4, "does not divide the 2 rank(s) of this job; valid with 2 rank(s): 1, 2"),
        (1, 4, "valid with 1 rank(s): 1"),
        (8, 8, "does not divide model.num_experts = 4; valid with 8 rank(s): 1, 2, 4"),
        (1, 3, "does not divide model.num_experts = 4; valid with 1 rank(s): 1"),  # nor would three ranks help
    ],
)
def test_ranks_that_do_not_fit(path, world, ep_size, part):
    message = refusal(path, f"parallel.ep_size={ep_size}", world=world)
    assert part in message
    assert str(path) in message
    assert f"ep_size = {ep_size}" in message


def test_no_number_of_interleaved_micro_batches_is_proposed_that_a_layer_refuses() -> None:
    sizes = dict(steps=1, micro_batch_size=1, sequence_length=8, gradient_accumulation=128, intra_layer_micro_batch=3)
    with pytest.raises(RecipeError, match=r"choose 1 or 2 or 4 or 8 or 16 or 32, or a multiple of 3"):
        from_mapping(TrainSection, sizes, "train")
