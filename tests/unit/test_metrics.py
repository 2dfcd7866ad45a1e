"""Rows, sums and pictures of a run, without a run."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from moe_ep.flights import MoEAux
from recipes import plots
from recipes.files import RunFolderError, replace_text
from recipes.metrics import Tally, flops_per_token, load_fields, peak_tflops
from recipes.metrics_file import MetricsFile, Row, closing_line, console_line, read_rows
from recipes.model_config import ModelConfig
from recipes.ranks import Ranks
from recipes.recipe import load_recipe
from recipes.session import Session
from tests.ranks.small_recipe import write

CPU = torch.device("cpu")
ROW = Row(
    step=7, loss=1.5, aux_loss=1.1, z_loss=None, grad_norm=0.5, lr=1e-3, tokens_per_s=12_340.0, tflops_per_rank=0.1,
    mfu=None, step_s=0.25, data_s=0.01, peak_mib=100.0, expert_imbalance=[1.0, 2.0], rank_imbalance_before=[1.0, 1.5],
    rank_imbalance_after=[1.0, 1.5], replicas=[0, 0], cross_rank_routes=9, host_syncs=None, eta_s=75.4,
)  # fmt: skip


def aux(load: list[int], tokens: int, loss: float) -> MoEAux:
    total = torch.tensor(load)
    value = torch.tensor(loss)
    return MoEAux(
        loss=value, aux_loss=value, z_loss=2 * value, load=total, num_tokens=torch.tensor(tokens),
        cross_rank_routes=total[2:].sum(), rank_load=total.view(2, 2).sum(1), replicas=total.new_ones(()),
    )  # fmt: skip


def test_sums_are_means_over_tokens_and_layers_and_counts_per_layer():
    """Two pieces of 1 and 3 tokens, two layers: a piece counts by its tokens, layers are averaged."""
    tally = Tally(2, 4, CPU, num_ranks=2)
    tally.add(1, torch.tensor(2.0), [aux([1, 1, 0, 0], 1, 4.0), aux([0, 0, 2, 0], 1, 8.0)])
    tally.add(3, torch.tensor(10.0), [aux([3, 3, 0, 0], 3, 0.0), aux([0, 0, 0, 6], 3, 0.0)])
    sums = tally.unpack(tally.pack(stop=False))
    assert (sums.tokens, sums.loss, sums.aux_loss, sums.z_loss, sums.stop) == (4, 3.0, 1.5, 3.0, False)
    assert sums.load.tolist() == [[4, 4, 0, 0], [0, 0, 2, 6]]
    assert sums.cross_rank_routes == 8
    fields = load_fields(sums, ep_size=2)
    assert fields["expert_imbalance"] == [2.0, 3.0]
    assert fields["rank_imbalance_before"] == fields["rank_imbalance_after"] == [2.0, 2.0]
    assert fields["replicas"] == [2, 2], "one on each of two ranks, in each of two pieces"


def test_rank_loads_after_replicas_are_those_that_were_computed(tmp_path):
    tally = Tally(1, 4, CPU, num_ranks=2)
    tally.add(2, torch.tensor(1.0), [dataclasses.replace(aux([5, 1, 1, 1], 2, 0.0), rank_load=torch.tensor([4, 4]))])
    sums = tally.unpack(tally.pack(stop=False))
    fields = load_fields(sums, ep_size=2)
    assert (fields["rank_imbalance_before"], fields["rank_imbalance_after"]) == ([1.5], [1.0])
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        file.add(dataclasses.replace(ROW, step=step), sums)
    MetricsFile(tmp_path / "metrics.jsonl", 2)
    loads = read_rows(tmp_path / "load.jsonl")
    assert [row["step"] for row in loads] == [1, 2]
    assert loads[0] == {"step": 1, "experts": [[5, 1, 1, 1]], "ranks_before": [[6, 2]], "ranks_after": [[4, 4]]}
    assert [p.name for p in plots.draw(tmp_path)] == ["loss.png", "load.png"]


def test_a_stop_of_any_rank_survives_the_sum():
    tally = Tally(0, 4, CPU)
    assert tally.unpack(tally.pack(stop=True) + tally.pack(stop=False)).stop
    assert tally.unpack(tally.pack(stop=False)).aux_loss is None


def test_a_resumed_run_drops_the_rows_after_its_checkpoint_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.add(dataclasses.replace(ROW, step=step))
    with path.open("a") as out:
        out.write('{"step": 4, "lo')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    MetricsFile(path, 2).add(dataclasses.replace(ROW, step=3, loss=9.0))
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 1.5), (2, 1.5), (3, 9.0)]
    assert json.loads(path.read_text().splitlines()[0]) == {**dataclasses.asdict(ROW), "step": 1}


def test_a_value_that_is_not_finite_is_no_json(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        MetricsFile(tmp_path / "metrics.jsonl", 0).add(dataclasses.replace(ROW, loss=float("nan")))


def test_the_line_for_people():
    assert console_line(ROW, 100) == (
        "step   7/100  loss 1.5000  grad 0.500  lr 1.00e-03  12.3k tok/s  imbalance 1.50  0.250 s/step  eta 0:01:15"
    )
    validated = dataclasses.replace(ROW, valid_loss=1.25, valid_unigram_entropy=3.261, expert_imbalance=[])
    assert console_line(validated, 100).endswith("imbalance -  0.250 s/step  eta 0:01:15  valid 1.2500 (unigram 3.26)")


def test_operations_of_a_model_counted_by_hand():
    config = ModelConfig(
        vocab_size=300, hidden_size=8, num_layers=2, num_attention_heads=2, num_kv_heads=1, head_dim=4, num_experts=4,
        top_k=2, expert_intermediate_size=5, first_dense_layers=1, intermediate_size=7,
    )  # fmt: skip
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # q, k and v, o
    weights = 2 * attention + 3 * 8 * 7 + (2 * 3 * 8 * 5 + 8 * 4) + 300 * 8
    assert flops_per_token(config, 16) == 6 * weights + 2 * 6 * 8 * 16


def test_the_cpu_has_no_known_peak():
    assert peak_tflops(CPU, "bfloat16") is None


def test_pictures_of_a_dense_and_of_a_sparse_run(tmp_path):
    assert plots.draw(tmp_path) == []
    for layers in ([], [1.0, 2.0]):
        row = dataclasses.replace(ROW, expert_imbalance=layers, rank_imbalance_before=layers)
        MetricsFile(tmp_path / "metrics.jsonl", 0).add(row)
        pictures = plots.draw(tmp_path)
        assert [p.name for p in pictures] == ["loss.png", "load.png"]
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_a_missing_matplotlib_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(write(tmp_path), ["parallel.ep_size=1"])
    recipe.folder.mkdir(parents=True)
    MetricsFile(recipe.folder / "metrics.jsonl", 0).add(ROW)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    for rank in (0, 1):
        Session(recipe, Ranks(rank, 1, 1, CPU))._plots()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "no plots" in lines[0]
    assert "moe-ep[plots]" in lines[0]
    assert not (recipe.folder / "loss.png").exists()


def test_a_picture_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(write(tmp_path), ["parallel.ep_size=1"])
    recipe.folder.mkdir(parents=True)
    MetricsFile(recipe.folder / "metrics.jsonl", 0).add(ROW)
    (recipe.folder / "loss.png").symlink_to("/dev/full")
    assert Session(recipe, Ranks(0, 1, 1, CPU))._plots() == []
    said = capsys.readouterr().out
    assert said.startswith(f"no plots in {recipe.folder}: OSError: [Errno 28] No space left on device; rerun")
    assert not (recipe.folder / "loss.png").is_symlink()
    pictures = Session(recipe, Ranks(0, 1, 1, CPU))._plots()
    assert [path.name for path in pictures] == ["loss.png", "load.png"]


def test_a_row_that_cannot_be_written_names_file_and_way_out(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.path.unlink()
    file.path.symlink_to("/dev/full")
    with pytest.raises(RunFolderError) as caught:
        file.add(ROW)
    assert str(caught.value).startswith(
        f"{file.path} cannot be written (No space left on device); free space or choose another run.dir"
    )


def test_rows_that_cannot_be_read_name_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(RunFolderError, match=r"metrics.jsonl cannot be read \(Expecting value"):
        MetricsFile(path, 0)


def test_a_text_that_cannot_be_replaced_stays(tmp_path):
    path = tmp_path / "env.json"
    path.write_text("before")
    (tmp_path / ".env.json.partial").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="No space left on device"):
        replace_text(path, "after")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["env.json"]


def test_the_last_words_say_the_last_balance_and_the_median_speed():
    rows = [dataclasses.asdict(ROW) | {"tokens_per_s": rate} for rate in (100.0, 5000.0, 3_000_000.0)]
    rows[-1] |= {"expert_imbalance": [1.0, 3.0], "rank_imbalance_before": [1.5]}
    assert closing_line(rows) == (
        "imbalance (max/mean, averaged over layers): experts 2.00, ranks 1.50; 5.0k tokens/s over all ranks (median)"
    )
