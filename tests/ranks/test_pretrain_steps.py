"""Gradients, one SGD step, the norm, counters and checkpoints of the trainer on 4 ranks, against one rank."""

from __future__ import annotations

import functools
import math
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe_ep.errors import CheckpointError, MoEError, PeerError, RecipeError
from moe_ep.gradients import global_norm
from moe_ep.testing.ranks import RankPool
from recipes import checkpoint
from recipes.build import build, make_way, resume
from recipes.files import RunFolderError
from recipes.identity import Identity, identity
from recipes.parallel import expert_names
from recipes.ranks import Ranks, over_process_group, same_everywhere
from recipes.recipe import load_recipe
from recipes.session import export_trace
from recipes.train_loop import Trainer, declared_host_syncs, fetch, forward_backward, save, train_step, validate
from tests.ranks.small_recipe import write

WORLD = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The one-rank references are no faster with more, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool():
    with RankPool(WORLD, timeout_s=90) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    write(folder)
    return folder


def make(folder: Path, ep_size: int, *overrides: str, world: int = WORLD) -> Trainer:
    accumulation = 2 * WORLD // world
    fixed = [f"data.path={folder / 'text'}", f"run.dir={folder}", f"train.gradient_accumulation={accumulation}"]
    recipe = load_recipe(folder / "small.toml", [*fixed, f"parallel.ep_size={ep_size}", *overrides])
    ranks = Ranks(0, 1, 1, CPU) if world == 1 else over_process_group(ep_size, CPU)
    return build(recipe, ranks)


def whole(trainer: Trainer, locals_: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full tensors, experts stacked to [E, ...], of one local tensor a parameter."""
    result = {}
    experts = expert_names(trainer.model)
    for owned, local in zip(trainer.optimizer.params, locals_, strict=True):
        value, param = local.detach(), owned.param
        if isinstance(param, DTensor):
            mesh, places = param.device_mesh, param.placements
            sharded = DTensor.from_local(value, mesh, places, run_check=False, shape=param.shape, stride=param.stride())
            value = sharded.full_tensor()
        if owned.name in experts and trainer.ranks.ep_group is not None:
            parts = [torch.empty_like(value) for _ in range(trainer.ranks.ep_size)]
            dist.all_gather(parts, value.contiguous(), group=trainer.ranks.ep_group)
            value = torch.cat(parts)
        result[owned.name] = value.clone()
    return result


def one_step(folder: Path, ep_size: int, overrides: tuple[str, ...], world: int = WORLD):
    """Gradients, weights after one SGD step, sums and norm."""
    trainer = make(folder, ep_size, *overrides, world=world)
    sums = forward_backward(trainer, fetch(trainer))
    grads = trainer.optimizer.gradients()
    norm = global_norm(trainer.optimizer.counted(grads), 2.0, trainer.ranks.group, CPU).item()
    full = whole(trainer, grads)
    with torch.no_grad():
        for master, grad in zip(trainer.optimizer.masters, grads, strict=True):
            master -= 0.5 * grad
    trainer.optimizer.publish()
    weights = {name: param for name, param in whole(trainer, trainer.optimizer.masters).items()}
    return full, weights, sums, norm


def on_ranks(group, rank, folder, ep_size, overrides):
    return one_step(folder, ep_size, overrides)


@functools.cache
def reference(folder: Path, overrides: tuple[str, ...] = ()):
    return one_step(folder, 1, overrides, world=1)


CASES = [(ep, dispatcher) for ep in (1, 2, 4) for dispatcher in ("all2all", "agrs")]


@pytest.mark.parametrize(("ep_size", "dispatcher"), CASES)
def test_gradients_and_one_sgd_step_equal_one_rank(pool, folder, ep_size, dispatcher):
    expected_grads, expected_weights, expected_sums, expected_norm = reference(folder)
    results = pool.run(on_ranks, folder, ep_size, (f"moe.dispatcher={dispatcher}",))
    for grads, weights, sums, norm in results:
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, expected_grads[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )
            torch.testing.assert_close(weights[name], expected_weights[name], rtol=1e-5, atol=1e-7)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        by_hand = math.sqrt(sum(g.double().square().sum().item() for g in expected_grads.values()))
        assert norm == pytest.approx(by_hand, rel=1e-5)
        assert sums.tokens == expected_sums.tokens == 8 * 16
        assert sums.loss == pytest.approx(expected_sums.loss, rel=1e-6)
        assert sums.aux_loss == pytest.approx(expected_sums.aux_loss, rel=1e-5)
        assert sums.z_loss == pytest.approx(expected_sums.z_loss, rel=1e-5)
        assert torch.equal(sums.load, expected_sums.load)
        assert (sums.cross_rank_routes > 0) == (ep_size > 1)
        assert sums.load.sum().item() == sums.tokens * 2 * 2


def test_balancing_losses_reach_the_router(folder):
    """The reference itself must feel the coefficients, or the equality above says nothing about them."""
    with_losses, _, _, _ = reference(folder)
    without, _, sums, _ = reference(folder, ("moe.aux_loss_coef=0.0", "moe.z_loss_coef=0.0"))
    name = "layers.0.moe.router.weight"
    assert not torch.allclose(with_losses[name], without[name], rtol=1e-3)
    assert sums.aux_loss == sums.z_loss == 0


@pytest.mark.parametrize("mode", ["moe", "layer"])
def test_recompute_changes_no_gradient_and_no_count(pool, folder, mode):
    expected_grads, _, expected_sums, _ = reference(folder)
    grads, _, sums, _ = pool.run(on_ranks, folder, 2, (f"train.recompute={mode}",))[0]
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-7)
    assert torch.equal(sums.load, expected_sums.load)


def norms_of_ones(group, rank, folder, ep_size):
    trainer = make(folder, ep_size)
    optimizer = trainer.optimizer
    for owned in optimizer.params:
        owned.param.grad = torch.ones_like(owned.param)
    counted = optimizer.counted(optimizer.gradients())
    norms = [global_norm(counted, kind, trainer.ranks.group, CPU).item() for kind in (1.0, 2.0, math.inf)]
    experts = expert_names(trainer.model)
    for owned in optimizer.params:
        if owned.name in experts and rank == 1:
            owned.param.grad = None
    lacking = global_norm(optimizer.counted(optimizer.gradients()), 1.0, trainer.ranks.group, CPU).item()
    nothing_here = [] if rank == 1 else [torch.ones(3)]
    return norms, lacking, global_norm(nothing_here, math.inf, trainer.ranks.group, CPU).item()


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_the_norm_counts_every_element_once(pool, folder, ep_size):
    number = sum(p.numel() for p in make(folder, 1, world=1).model.parameters())
    experts = sum(p.numel() for n, p in make(folder, 1, world=1).model.named_parameters() if ".experts." in n)
    for norms, lacking, largest in pool.run(norms_of_ones, folder, ep_size):
        assert norms == pytest.approx([number, math.sqrt(number), 1.0])
        assert lacking == pytest.approx(number - experts / 4)
        assert largest == 1


def train_and_evaluate(group, rank, folder, evaluations):
    overrides = ("moe.router=sigmoid", "moe.bias_update_rate=0.01", "moe.aux_loss_coef=0.0")
    trainer = make(folder, 2, *overrides)
    rows = []
    for _ in range(3):
        row, sums = train_step(trainer)
        rows.append((row.loss, row.grad_norm, sums.load.sum().item()))
        for _ in range(evaluations):
            validate(trainer)
    return rows, [layer.router.bias.clone() for layer in trainer.moe], validate(trainer)


def test_evaluation_leaves_counters_bias_and_training_alone(pool, folder):
    plain = pool.run(train_and_evaluate, folder, 0)
    evaluated = pool.run(train_and_evaluate, folder, 1)
    for rank in range(WORLD):
        assert evaluated[rank][0] == plain[rank][0] == plain[0][0]
        assert all(routes == 8 * 16 * 2 * 2 for _, _, routes in plain[rank][0])
        for bias, other, first in zip(plain[rank][1], evaluated[rank][1], plain[0][1], strict=True):
            assert torch.equal(bias, other)
            assert torch.equal(bias, first)
            assert 0 < bias.abs().max().item() <= 0.03 + 1e-6
        assert plain[rank][2] == evaluated[rank][2] == plain[0][2]


def bfloat16_steps(group, rank, folder, ep_size):
    trainer = make(folder, ep_size, "model.dtype=bfloat16")
    rows = [train_step(trainer)[0] for _ in range(4)]
    names = {owned.param.dtype for owned in trainer.optimizer.params if "router" in owned.name}
    return [row.loss for row in rows], names, whole(trainer, trainer.optimizer.masters)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_bfloat16_trains_with_float32_masters_and_routers(pool, folder, ep_size):
    single = make(folder, 1, "model.dtype=bfloat16", world=1)
    expected = [train_step(single)[0].loss for _ in range(4)]
    for losses, router_dtypes, masters in pool.run(bfloat16_steps, folder, ep_size):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert losses[-1] < losses[0] - 0.05
        assert router_dtypes == {torch.float32}
        assert {master.dtype for master in masters.values()} == {torch.float32}


def syncs_of(group, rank, folder, overrides):
    return declared_host_syncs(make(folder, 4, *overrides))


@pytest.mark.parametrize(
    ("overrides", "syncs"),
    [((), 2 * 2), (("moe.dispatcher=agrs",), 2 * 2),
     (("moe.dispatcher=agrs", "moe.router=grouped", "moe.num_groups=4", "model.top_k=4"), 0)],
)  # fmt: skip
def test_host_syncs_are_those_of_the_form_that_was_built(pool, folder, overrides, syncs):
    """Two layers and two micro-batches; agrs with the grouped router knows its rows without asking the device."""
    assert pool.run(syncs_of, folder, overrides) == [syncs] * WORLD


RESUMING = ("moe.router=sigmoid", "moe.bias_update_rate=0.01")


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    optimizer = trainer.optimizer
    result = {f"model.{n}": t for n, t in whole(trainer, optimizer.masters).items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = [optimizer.moments(i)[kind] for i in range(len(optimizer.params))]
        result |= {f"{kind}.{n}": t for n, t in whole(trainer, moments).items()}
    return result | {f"bias.{i}": layer.router.bias.clone() for i, layer in enumerate(trainer.moe)}


def train_and_save(group, rank, folder, ep_size):
    trainer = make(folder, ep_size, *RESUMING, f"run.name=from{ep_size}")
    for _ in range(2):
        train_step(trainer)
    save(trainer)
    saved = state(trainer)
    return saved, train_step(trainer)[0].loss


def load_and_train(group, rank, folder, path, ep_size, world=WORLD):
    trainer = make(folder, ep_size, *RESUMING, world=world)
    progress = restore(trainer, path)
    return state(trainer), progress.step, train_step(trainer)[0].loss


def restore(trainer: Trainer, path: Path, ours: Identity | None = None):
    ours = ours or identity(trainer.recipe, trainer.corpus)
    progress = checkpoint.restore(path, ours, trainer.model, trainer.optimizer, trainer.entries, trainer.ranks)
    trainer.step = progress.step
    return progress


@pytest.fixture(scope="module", params=[2, 4])
def saved(request, pool, folder):
    ep_size = request.param
    results = pool.run(train_and_save, folder, ep_size)
    return ep_size, folder / f"from{ep_size}" / "checkpoints" / "step-00000002", results[0]


def test_a_checkpoint_resumes_on_any_number_of_ranks(pool, folder, saved):
    saved_by, path, (expected, next_loss) = saved
    for ep_size in (1, 2, 4):
        for found, step, loss in pool.run(load_and_train, folder, path, ep_size):
            assert step == 2
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), name
            assert loss == (next_loss if ep_size == saved_by else pytest.approx(next_loss, abs=1e-5))
    found, _, loss = load_and_train(None, 0, folder, path, 1, world=1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert loss == pytest.approx(next_loss, abs=1e-5)


def test_every_expert_stands_in_the_file_under_its_global_id(saved):
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = FileSystemReader(saved[1]).read_metadata().state_dict_metadata
    for prefix in ("model", "exp_avg", "exp_avg_sq"):
        for leaf in ("w_gate_up", "w_down"):
            wanted = {f"{prefix}.layers.1.moe.experts.{expert}.{leaf}" for expert in range(4)}
            assert wanted == {n for n in names if n.startswith(f"{prefix}.layers.1.moe.experts.") and n.endswith(leaf)}
    assert "model.layers.0.moe.router.bias" in names


def failing_saves(group, rank, folder):
    """A file-size limit on one rank stands for a full disk: its write fails in the middle."""
    trainer = make(folder, 4, "run.name=full")
    train_step(trainer)
    save(trainer)
    train_step(trainer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        save(trainer)
        message = None
    except CheckpointError as err:
        message = str(err)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    left = sorted(p.name for p in (folder / "full" / "checkpoints").iterdir())
    train_step(trainer)
    save(trainer)
    return message, left, checkpoint.newest(folder / "full" / "checkpoints").name


def test_a_full_disk_is_named_on_every_rank_and_the_checkpoint_before_stays(pool, folder):
    for message, left, newest in pool.run(failing_saves, folder):
        assert message is not None
        assert "step-00000002 failed" in message
        assert "step-00000001" in message
        assert left == ["step-00000001"]
        assert newest == "step-00000003"


def failing_trace(group, rank, folder):
    """As above: the profiler itself says nothing about a file that it could only write a part of."""
    profiler = torch.profiler.profile()
    profiler.start()
    torch.ones(64, 64) @ torch.ones(64, 64)
    profiler.stop()
    path, ranks = folder / "traces" / f"rank{rank}.json", over_process_group(2, CPU)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        ranks.together(lambda: export_trace(profiler, path))
        message = None
    except RunFolderError as err:
        message = str(err)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return message, path.exists()


def test_a_trace_that_was_cut_off_is_named_on_every_rank(pool, folder):
    found = pool.run(failing_trace, folder)
    assert [exists for _, exists in found] == [True, True, False, True]
    expected = f"{folder / 'traces' / 'rank2.json'} cannot be written (only a part of it was); free space"
    assert all(message is not None and message.startswith(expected) for message, _ in found), found


def test_what_a_kill_during_a_save_leaves_is_no_checkpoint_and_goes(folder):
    trainer = make(folder, 1, "run.name=killed", world=1)
    train_step(trainer)
    save(trainer)
    checkpoints = folder / "killed" / "checkpoints"
    partial = checkpoints / ".partial-step-00000002"
    shutil.copytree(checkpoints / "step-00000001", partial)
    (partial / "meta.json").unlink()
    assert checkpoint.find("auto", checkpoints) == checkpoints / "step-00000001"
    train_step(trainer)
    save(trainer)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint.find("never", checkpoints) is None


def test_never_starts_afresh_and_keeps_the_run_before(folder):
    trainer = make(folder, 1, "run.name=again", world=1)
    train_step(trainer)
    save(trainer)
    trainer = make(folder, 1, "run.name=again", "checkpoint.resume=never", world=1)
    assert resume(trainer) == "starts at step 0"
    assert (folder / "again").exists(), "reading alone moves nothing"
    assert make_way(trainer) == f"the run of this name before is now {folder / 'again.old1'}"
    assert trainer.step == 0
    assert not (folder / "again").exists()
    assert checkpoint.newest(folder / "again.old1" / "checkpoints").name == "step-00000001"


def test_only_the_newest_checkpoints_are_kept(folder):
    trainer = make(folder, 1, "run.name=kept", "checkpoint.keep=2", world=1)
    for _ in range(4):
        train_step(trainer)
        save(trainer)
    assert [step for step, _ in checkpoint.list_steps(folder / "kept" / "checkpoints")] == [3, 4]


def refused_loads(group, rank, folder, path):
    messages = []
    same = identity((first := make(folder, 2, *RESUMING)).recipe, first.corpus)
    softmax = ("moe.router=softmax", "moe.bias_update_rate=0.0")
    absent = path.parent / "step-00000009"
    for overrides, there, ours in ((("model.num_layers=3",), path, None), (softmax, path, same), ((), absent, None)):
        trainer = make(folder, 2, *RESUMING, *overrides)
        before = state_sum(trainer)
        try:
            restore(trainer, there, ours)
            messages.append(None)
        except CheckpointError as err:
            messages.append(str(err))
        assert state_sum(trainer) == before
    return messages


def state_sum(trainer: Trainer) -> float:
    return sum(master.double().sum().item() for master in trainer.optimizer.masters)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(pool, folder, saved):
    messages = pool.run(refused_loads, folder, saved[1])
    assert all(m == messages[0] for m in messages)
    layers, bias, missing = messages[0]
    assert "model.num_layers is 2 there and 3 in this run" in layers
    assert "has too much model.layers.0.moe.router.bias, model.layers.1.moe.router.bias" in bias
    assert "meta.json" in missing
    assert "no complete checkpoint" in missing


def different_tables(group, rank):
    odd = rank in (1, 3)
    table = {"train.lr": 0.1 if rank == 3 else 0.2, "train.steps": 5, "data.path": ["x"] if odd else None}
    try:
        same_everywhere(over_process_group(2, CPU), table, "r.toml")
    except RecipeError as err:
        return str(err)
    return None


def test_ranks_that_disagree_all_learn_about_everything_that_differs(pool):
    expected = (
        "r.toml: data.path is None on rank 0 and ['x'] on rank 1, 3; train.lr is 0.2 on rank 0 and 0.1 on rank 3; "
        "start all ranks alike"
    )
    assert pool.run(different_tables) == [expected] * WORLD


def fail_on_the_second(group, rank):
    def act():
        if rank == 1:
            raise OSError(28, "No space left on device")

    try:
        over_process_group(2, CPU).together(act)
    except MoEError as err:
        return type(err), str(err), err.agreed


def test_an_error_of_another_kind_is_the_failing_ranks_own_and_a_peers_elsewhere(pool):
    found = pool.run(fail_on_the_second)
    assert [kind for kind, _, _ in found] == [PeerError, MoEError, PeerError, PeerError]
    assert {(text, agreed) for _, text, agreed in found} == {
        ("rank 1: OSError: [Errno 28] No space left on device", True)
    }


def mistake_on_the_second(group, rank):
    try:
        over_process_group(2, CPU).together(lambda: {}["absent"] if rank == 1 else None)
    except (MoEError, KeyError) as err:
        return type(err), str(err)


def test_a_mistake_of_ours_keeps_its_traceback_and_lets_nobody_wait(pool):
    found = pool.run(mistake_on_the_second)
    assert [kind for kind, _ in found] == [PeerError, KeyError, PeerError, PeerError]
    assert {text for _, text in found} == {"'absent'", "rank 1: KeyError: 'absent'"}
