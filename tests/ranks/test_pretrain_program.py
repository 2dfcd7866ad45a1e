"""The program as a user meets it: files, exit codes, signals, lost ranks, resuming. Few steps of a tiny model."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ep import doctor
from recipes.metrics_file import Row
from recipes.recipe import load_recipe
from tests.ranks.launch import PROGRAM, run, start
from tests.ranks.small_recipe import write
from tools import overlap_report

WORLD = 4
TIMES = ("tokens_per_s", "tflops_per_rank", "step_s", "data_s", "peak_mib", "eta_s")
DOCUMENTED = """step, loss, aux_loss, z_loss, grad_norm, lr, tokens_per_s, tflops_per_rank, mfu, step_s, data_s,
peak_mib, expert_imbalance, rank_imbalance_before, rank_imbalance_after, replicas, cross_rank_routes, host_syncs, eta_s,
valid_loss, valid_unigram_entropy"""
BIAS = ["moe.router=sigmoid", "moe.bias_update_rate=0.01"]


def rows(folder: Path, name: str = "small") -> list[dict]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def kill(job) -> None:
    for process in job.processes:
        process.kill()
    for process in job.processes:
        process.join()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 8 steps with selection bias and accumulation, traced at step 3."""
    folder = tmp_path_factory.mktemp("unbroken")
    recipe = write(folder)
    overrides = [*BIAS, "train.steps=8", "metrics.valid_every=4", "metrics.trace_steps=[3, 3]"]
    return folder, run(WORLD, [str(recipe), *overrides], folder)


def test_the_run_folder_holds_what_a_run_leaves(unbroken):
    folder, _ = unbroken
    left = folder / "runs" / "small"
    names = {p.name for p in left.iterdir()}
    tables = {"recipe.toml", "env.json", "metrics.jsonl", "load.jsonl"}
    assert names == {*tables, "loss.png", "load.png", "trace", "checkpoints", "lock"}
    assert {p.name for p in (left / "checkpoints").iterdir()} == {"step-00000004", "step-00000006", "step-00000008"}
    assert {p.name for p in (left / "trace").iterdir()} == {f"rank{rank}.json" for rank in range(WORLD)}
    assert json.loads((left / "trace" / "rank2.json").read_text())["traceEvents"]
    assert all((left / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "load.png"))
    resolved = load_recipe(left / "recipe.toml")
    assert (resolved.moe.router, resolved.train.steps, resolved.checkpoint.keep) == ("sigmoid", 8, 3)
    environment = json.loads((left / "env.json").read_text())
    assert doctor.machine().keys() <= environment.keys()
    assert len(environment["corpus"]["sha256"]) == 64


def test_a_finished_run_says_that_nothing_is_left_and_how_to_start_afresh(unbroken, tmp_path):
    folder, _ = unbroken
    shutil.copytree(folder / "runs", tmp_path / "runs")
    job = run(WORLD, [str(write(tmp_path)), *BIAS, "train.steps=8"], tmp_path)
    assert "nothing is left to train: train.steps = 8 are done; raise it to go on, or start afresh with" in job.text(0)
    assert "after 8 steps, 0 of them here" in job.text(0)


def test_its_traces_can_be_reported_on(unbroken, capsys):
    folder, _ = unbroken
    traces = [str(folder / f"runs/small/trace/rank{rank}.json") for rank in range(WORLD)]
    assert overlap_report.main(traces) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{WORLD} rank(s), CPU ranks over gloo, whose times are not performance; steps 3; rank ")
    assert "hidden share of rank " in out
    sent = r"2( +\d+\.\d{3}){2,3} "  # of two micro-batches: computation, if any; communication, its exposed part
    for layer in range(2):
        for way in ("fwd", "bwd"):
            for stage in ("attention", "route", "experts"):
                assert re.search(rf"^ *{layer}  {way} +{stage} +\d+\.\d{{3}}", out, re.M), (layer, way, stage)
            for stage in ("exchange of counts",) * (way == "fwd") + ("dispatch", "combine"):
                assert re.search(rf"^ *{layer}  {way} +{stage} +{sent}", out, re.M), (layer, way, stage)


def test_rows_have_exactly_the_documented_keys(unbroken):
    folder, _ = unbroken
    lines = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    keys = re.findall(r"\w+", DOCUMENTED)
    assert list(Row.__dataclass_fields__) == keys
    assert [row["step"] for row in lines] == list(range(1, 9))
    for row in lines:
        assert list(row) == keys
        assert len(row["expert_imbalance"]) == len(row["rank_imbalance_before"]) == 2
        assert row["rank_imbalance_after"] == row["rank_imbalance_before"]
        assert row["replicas"] == [0, 0]
        assert all(1 <= value <= 4 for value in row["expert_imbalance"])
        assert row["cross_rank_routes"] > 0
        assert row["tokens_per_s"] > 0
        assert (row["valid_loss"] is not None) == (row["step"] in (4, 8))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["valid_unigram_entropy"] > 2


def test_one_line_a_step_and_the_resolved_dispatcher_on_one_rank_only(unbroken):
    _, job = unbroken
    text = job.text(0)
    assert text.splitlines()[0].startswith("dispatcher all2all (4 ranks, 1 experts on each)")
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(lines) == 8
    for part in ("step 8/8", "loss", "grad", "lr", "tok/s", "imbalance", "s/step", "eta 0:00:00", "valid"):
        assert part in lines[-1]
    assert re.search(r"done: held-out loss .* nats/byte .* after 8 steps, 8 of them here in 0:0\d:\d\d\n", text)
    assert re.search(r"metrics \S+metrics.jsonl  plots \S+loss.png, \S+load.png\n", text)
    assert re.search(
        r"imbalance \(max/mean, averaged over layers\): experts \d+\.\d\d, ranks \d+\.\d\d; .* tokens/s", text
    )
    assert "sample: def " in text
    assert all("step" not in job.text(rank) for rank in range(1, WORLD))


def test_killed_while_training_it_resumes_bit_for_bit_and_on_other_ranks_closely(unbroken, tmp_path):
    folder, _ = unbroken
    recipe = str(write(tmp_path))
    job = start(WORLD, [recipe, *BIAS, "train.steps=8", "metrics.valid_every=4"], tmp_path)
    job.wait_for("step 5/8")  # saved at 4: the steps since are done again
    kill(job)
    newest = max(p.name for p in (tmp_path / "runs/small/checkpoints").glob("step-*"))
    assert newest in ("step-00000004", "step-00000006"), "killed too late to show anything"
    copy = tmp_path / "copy"
    copy.mkdir()
    write(copy)
    shutil.copytree(tmp_path / "runs", copy / "runs")

    job = run(WORLD, [recipe, *BIAS, "train.steps=8", "metrics.valid_every=4"], tmp_path)
    assert "resumes at step" in job.text(0)
    assert rows(tmp_path) == rows(folder)

    other = ["parallel.ep_size=2", "train.gradient_accumulation=4"]
    run(2, [str(copy / "small.toml"), *BIAS, *other, "train.steps=8", "metrics.valid_every=4"], copy)
    for row, expected in zip(rows(copy), rows(folder), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_sigterm_on_one_rank_saves_on_all_and_ends_with_0(tmp_path):
    recipe = str(write(tmp_path))
    job = start(WORLD, [recipe, "train.steps=100000", "checkpoint.every=0"], tmp_path)
    job.wait_for(" 3/100000")
    os.kill(job.processes[2].pid, signal.SIGTERM)
    assert job.wait(60) == [0] * WORLD
    step = rows(tmp_path)[-1]["step"]
    assert f"SIGTERM: saved step {step} in" in job.text(0)
    assert [p.name for p in (tmp_path / "runs/small/checkpoints").iterdir()] == [f"step-{step:08d}"]


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "another rank failed or was lost"), (signal.SIGSTOP, "")]
)
def test_a_lost_rank_ends_the_others_with_3_and_a_message(tmp_path, number, said):
    recipe = str(write(tmp_path))
    job = start(2, [recipe, "parallel.ep_size=2", "train.steps=100000", "train.timeout_s=4"], tmp_path)
    job.wait_for(" 2/100000")
    os.kill(job.processes[1].pid, number)
    began = time.monotonic()
    job.processes[0].join(30)
    took = time.monotonic() - began
    if number == signal.SIGSTOP:
        job.processes[1].kill()
    assert job.wait(10)[0] == 3
    assert took < 4 + 6, f"{took} s"
    assert "another rank failed or was lost" in job.text(0) or "rank 1 gave no sign of life" in job.text(0)
    assert said in job.text(0)


@pytest.mark.parametrize(
    ("world", "overrides", "parts"),
    [
        (2, ["parallel.ep_size=2", "moe.dispatcher=al2all"], ["[moe]", "al2all", "did you mean 'all2all'"]),
        (2, ["parallel.ep_size=2", "moe.experts=tourch"], ["tourch", "torch"]),
        (2, ["parallel.ep_size=2", "data.path=nowhere"], ["[data] path", "nowhere"]),
        (1, ["parallel.ep_size=1", "moe.kernels=cuda"], ["[moe]", "kernels = 'cuda'"]),
        (3, ["parallel.ep_size=2"], ["ep_size = 2", "3 rank(s)"]),
        (1, ["parallel.ep_size=1", "parallel.backend=nccl"], ["'nccl'", "'gloo'"]),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence_with_2_before_any_training(tmp_path, world, overrides, parts):
    if "parallel.backend=nccl" in overrides and doctor.machine()["gpus"]:
        pytest.skip("this machine has a GPU")
    job = start(world, [str(write(tmp_path)), *overrides], tmp_path)
    assert job.wait() == [2] * world
    lines = job.text(0).strip().splitlines()
    assert len(lines) == 1, job.text()
    assert lines[0].startswith("refused: ")
    assert set(job.text().splitlines()) <= {"", *lines}  # no rank knows anything else
    for part in [str(tmp_path / "small.toml"), *parts]:
        assert part in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (["parallel.ep_size=1"], "parallel.ep_size is 2 on rank 0 and 1 on rank 1; start all ranks alike"),
        (
            ["model.hidden_size=32", "train.lr=0.5"],
            "model.hidden_size is 16 on rank 0 and 32 on rank 1; train.lr is 0.01 on rank 0 and 0.5 on rank 1; start",
        ),
    ],
)
def test_ranks_with_different_recipes_are_refused_with_every_difference(tmp_path, other, part):
    job = start(2, [str(write(tmp_path)), "parallel.ep_size=2"], tmp_path, last_rank_only=tuple(other))
    assert job.wait(30) == [2, 2]
    assert part in job.text()
    assert len(job.text().strip().splitlines()) == 1


def test_a_refusal_on_the_last_rank_alone_is_said_there_and_ends_the_first_in_time(tmp_path):
    job = start(2, [str(write(tmp_path)), "parallel.ep_size=2", "train.timeout_s=3"], tmp_path, ("train.stepz=1",))
    assert job.wait(30) == [3, 2]
    assert "refused: " in job.text(1) and "unknown key 'stepz'" in job.text(1)
    assert "only 1 of 2 ranks came within 3 s" in job.text(0)
    assert "Traceback" not in job.text()


def test_a_truncated_checkpoint_is_named_and_never_skips_what_is_whole(unbroken, tmp_path):
    folder, _ = unbroken
    recipe = str(write(tmp_path))
    shutil.copytree(folder / "runs", tmp_path / "runs")
    newest = tmp_path / "runs/small/checkpoints/step-00000008"
    victim = next(newest.glob("*.distcp"))
    os.truncate(victim, victim.stat().st_size // 2)
    alone = [recipe, *BIAS, "parallel.ep_size=1", "train.gradient_accumulation=8"]
    job = start(1, [*alone, "train.steps=9"], tmp_path)
    assert job.wait() == [1]
    assert f"{victim.name} has {victim.stat().st_size} bytes" in job.text()
    assert "CheckpointError" in job.text()
    assert "Traceback" not in job.text()
    run(1, [*alone, "train.steps=8", f"checkpoint.resume={newest.parent / 'step-00000006'}", "run.name=b"], tmp_path)
    assert rows(tmp_path, "b")[-1]["loss"] == pytest.approx(rows(folder)[-1]["loss"], abs=1e-5)


def test_a_loss_that_is_not_finite_ends_every_rank_with_one_message(tmp_path):
    job = start(2, [str(write(tmp_path)), "parallel.ep_size=2", "train.lr=1e30", "train.warmup_steps=0"], tmp_path)
    codes = job.wait()
    assert set(codes) <= {1, 3}
    assert 1 in codes
    assert "finite" in job.text()


def poison(rank: int) -> None:
    """NaN at the first router of rank 1, in the third step."""
    from recipes import train_loop

    plain = train_loop.forward_backward

    def poisoned(trainer, *rest):
        if rank == 1 and trainer.step == 2:
            trainer.moe[0].router.register_forward_pre_hook(lambda _, inputs: (inputs[0] * math.nan, *inputs[1:]))
        return plain(trainer, *rest)

    train_loop.forward_backward = poisoned


@pytest.mark.parametrize(
    ("ep_size", "said"), [(1, "rank 1 failed: NonFiniteError: layer 0, micro-batch 0"), (2, "rank 1 reported a fault")]
)
def test_a_fault_of_one_rank_is_named_there_and_pointed_at_by_the_other(tmp_path, ep_size, said):
    """With ep_size = 1 the layers talk to nobody: the other rank sees a connection close, and asks the store why."""
    job = start(2, [str(write(tmp_path)), f"parallel.ep_size={ep_size}"], tmp_path, prepare=poison)
    assert job.wait() == [3, 1]
    assert "rank 1 failed: NonFiniteError: layer 0, micro-batch 0: non-finite router logits in 16 tokens" in job.text(1)
    told = job.text(0).splitlines()[-1]
    assert told.startswith("rank 0: another rank failed or was lost, so this one stops: ")
    assert said in told and told.isascii()
    assert "Traceback" not in job.text()


def test_a_full_disk_while_logging_ends_every_rank_with_1_and_one_sentence(tmp_path):
    """A limit on the size of files stands for a full disk; of all files of rank 0 the rows meet it first."""
    overrides = ["parallel.ep_size=2", "train.steps=100000", "checkpoint.every=0", "train.lr=1e-5"]
    job = start(2, [str(write(tmp_path)), *overrides], tmp_path)
    job.wait_for(" 2/100000")
    limit = (tmp_path / "runs/small/metrics.jsonl").stat().st_size + 16384
    resource.prlimit(job.processes[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
    assert job.wait(60) == [1, 1], job.text()
    told = job.text(0).splitlines()[-1]
    assert told.startswith("failed: RunFolderError: ")
    assert "runs/small/metrics.jsonl cannot be written (File too large); free space or choose another run.dir" in told
    assert "Traceback" not in job.text()


def torchrun(arguments: list[str], folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_two_nodes_train_the_same_as_one(unbroken, tmp_path):
    """Ranks of the second node have the local numbers of the first; what each says and writes goes by its own."""
    folder, _ = unbroken
    overrides = [*BIAS, "train.steps=8", "metrics.valid_every=4", "metrics.trace_steps=[3, 3]"]
    job = run(WORLD, [str(write(tmp_path)), *overrides], tmp_path, nodes=2)
    assert rows(tmp_path) == rows(folder)
    assert {p.name for p in (tmp_path / "runs/small/trace").iterdir()} == {f"rank{rank}.json" for rank in range(WORLD)}
    assert ["step 8/8" in job.text(rank) for rank in range(WORLD)] == [True, False, False, False]


@pytest.mark.slow
def test_two_agents_train_the_same_as_one_launcher(unbroken, tmp_path):
    """`torchrun --nnodes 2` on one machine, two ranks each, against four ranks started together."""
    folder, _ = unbroken
    arguments = [str(PROGRAM), str(write(tmp_path)), *BIAS, "train.steps=8", "metrics.valid_every=4"]
    port = random.SystemRandom().randrange(20000, 50000)
    meet = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    agents = [torchrun([*meet, *arguments], tmp_path) for _ in range(2)]
    outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert rows(tmp_path) == rows(folder)
