"""Megatron-Core on two GPUs: 100 steps as on its own dispatcher, grouped experts, interleaving, its optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep import close_dispatchers
from moe_ep.testing.ranks import RankPool
from tests.gpu import megatron_runs as runs
from tests.gpu.megatron_runs import engine
from tests.ranks import megatron_cpu, small_recipe

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")

pytestmark = pytest.mark.gpu(2)
OURS = ("all2all", "agrs", "deepep", "nccl_ep", "direct")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before any rank's first GEMM, for deterministic ones
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=300.0) as ranks:
        yield ranks


def test_a_hundred_steps_agree_to_six_digits(pool: RankPool) -> None:
    """float32, experts one after the other on both sides, deterministic algorithms."""
    native, ours = pool.run(runs.trained, None, 100), pool.run(runs.trained, "all2all", 100)
    for (native_calls, want), (calls, got) in zip(native, ours, strict=True):
        assert native_calls == {"MoEAlltoAllTokenDispatcher": 200} and calls == {"TicketDispatcher": 200}, "two layers"
        assert want[-1][0] < want[0][0]
        for expected, found in zip(want, got, strict=True):
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_hundred_steps_in_bfloat16(pool: RankPool) -> None:
    """Two runs that round in another order drift apart, so neither is the other's measure; a float32 run is.

    From the same values it runs beside them, and what Megatron's own dispatcher in bfloat16 is away from it, on the
    mean of a hundred steps, is what bfloat16 costs. Ours adds a token's K rows up in float32 and rounds once, so it is
    not further away but for chance: twice as far in the loss, and in the gradient norms of all parameters together.
    """
    true = pool.run(runs.trained, None, 100, "reference")
    native, ours = (pool.run(runs.trained, name, 100, "bfloat16") for name in (None, "all2all"))
    for (_, reference), (native_calls, want), (calls, got) in zip(true, native, ours, strict=True):
        assert native_calls == {"MoEAlltoAllTokenDispatcher": 200} and calls == {"TicketDispatcher": 200}
        assert want[-1][0] < want[0][0]
        truth, native_values, our_values = (torch.tensor(values).double() for values in (reference, want, got))
        away, our_away = ((values - truth).abs() for values in (native_values, our_values))
        assert our_away[:, 0].mean() <= 2 * away[:, 0].mean()
        assert our_away[:, 1:].norm(dim=1).mean() <= 2 * away[:, 1:].norm(dim=1).mean()
        assert 0 < away[:, 0].mean() < 0.25 * truth[:, 0].mean(), "the reference is one"


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in OURS), ("all2all", {"moe_latent_size": 128})])
def test_grouped_experts_on_every_dispatcher(pool: RankPool, name: str, changes: dict[str, int]) -> None:
    """bfloat16: K = 4 rows are added up in another order or precision, each addition rounds by 2^-9 of the largest."""
    engine()
    got = pool.run(runs.one_layer, name, changes)
    if isinstance(got[0], str):
        pytest.skip(got[0])
    for want, found in zip(pool.run(runs.one_layer, None, changes), got, strict=True):
        for a, b in zip(want, found, strict=True):
            assert (a - b).abs().max() <= 4 * 2**-8 * a.abs().max()


@pytest.mark.parametrize("name", OURS)
def test_interleaved_pieces_are_the_serial_ones(pool: RankPool, name: str) -> None:
    engine()
    results = pool.run(runs.interleaved, name)
    if isinstance(results[0], str):
        pytest.skip(results[0])
    for want, got, grads, got_grads in results:
        assert torch.equal(got, want)
        for a, b in zip(grads, got_grads, strict=True):  # two addends in bfloat16, in another order
            assert (a - b).norm() <= 2**-7 * a.norm()


def with_copies(group: Any, rank: int, grouped: bool, pieces: int) -> Any:
    """Without and with copies of experts: loss and gradients after a step of SGD; copies in the last plans."""
    from moe_ep.integrations.megatron import use_domino

    changes = dict(bf16=True, params_dtype=torch.bfloat16) if grouped else {}
    found, placed = [], list[int]()
    with megatron_cpu.parallel(2), megatron_cpu.counted_copies(placed):
        for replica in (None, {"slots": 2}):
            model = runs.model_of("all2all", grouped=grouped, replica=replica, **changes)
            model = model if pieces == 1 else use_domino(model, pieces)
            for step in range(2):
                model.zero_grad()
                loss = runs.losses(model, rank, step).mean()
                loss.backward()
                grads = {name: p.grad.float().cpu() for name, p in model.named_parameters()}
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
            found.append((loss.item(), grads, sum(placed)))
    return found


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "grouped"])
def test_copies_of_experts_change_nothing_but_the_place_of_rows(pool: RankPool, grouped: bool, pieces: int) -> None:
    """Grouped in bfloat16: a weight gradient in two or three parts, each rounded by 2^-9, in place of one."""
    if grouped:
        engine()
    bound = 2**-6 if grouped else 1e-4
    for (want, grads, none), (got, others, copies) in pool.run(with_copies, grouped, pieces):
        assert none == 0 < copies
        assert got == pytest.approx(want, rel=bound)
        for name, grad in grads.items():
            assert (others[name] - grad).norm() <= bound * grad.norm(), name


def test_fp8_experts_take_our_rows_as_megatrons(pool: RankPool) -> None:
    engine()
    runs.check_fp8(pool)


def test_a_second_pass_drops_and_routes_as_the_first(pool: RankPool) -> None:
    """float32: Megatron's random states on the GPU, which its dropout draws from, are set back for the second pass."""
    for plain, kept, again in pool.run(runs.recomputed):
        assert not all(map(torch.equal, plain, kept))
        for a, b in zip(kept, again, strict=True):
            assert (a - b).norm() <= 1e-5 * a.norm()


def session(group: Any, rank: int, folder: str, overrides: tuple[str, ...]) -> list[float]:
    from recipes import megatron_groups, megatron_train
    from recipes.megatron_recipe import load
    from recipes.ranks import over_process_group

    loaded = load(Path(folder) / "small.toml", overrides)
    here = Path.cwd()
    os.chdir(folder)
    ranks = over_process_group(2, torch.device("cuda", rank))
    megatron_groups.open_groups(ranks)
    try:
        trainer, _ = megatron_train.build(loaded, ranks)
        rows = [megatron_train.train_step(trainer, step) for step in range(1, 7)]
        return [value for row in rows for value in (row.loss, row.grad_norm)] + [megatron_train.validate(trainer)]
    finally:
        os.chdir(here)
        close_dispatchers(megatron_groups.parallel_state.get_expert_model_parallel_group())
        megatron_groups.parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("optimizer", "recompute"), [("adamw", "none"), ("distributed", "none"), ("distributed", "layer")]
)
def test_the_program_and_megatrons_distributed_optimizer(
    pool: RankPool, tmp_path: Path, optimizer: str, recompute: str
) -> None:
    engine()
    before, _, after = small_recipe.write(tmp_path).read_text().partition("[checkpoint]")
    (tmp_path / "small.toml").write_text(before + "[metrics]" + after.partition("[metrics]")[2])
    common = (
        "parallel.ep_size=2", "parallel.backend=nccl", "moe.weighting=activation", "megatron.transformer_engine=true",
        "megatron.grouped_gemm=true", "model.hidden_size=128", "model.head_dim=64", "model.dtype=bfloat16",
        "model.expert_intermediate_size=64", "model.shared_intermediate_size=64", "train.sequence_length=64",
        f"megatron.optimizer={optimizer}",
    )  # fmt: skip
    native = pool.run(session, str(tmp_path), (*common, "megatron.dispatcher=native"))
    changes = ("train.intra_layer_micro_batch=2", f"train.recompute={recompute}")
    ours = pool.run(session, str(tmp_path), (*common, *changes))
    assert native[0] == pytest.approx(native[1]) and native[0][-1] < native[0][0]
    for want, got in zip(native, ours, strict=True):
        assert got == pytest.approx(want, rel=0.03)  # bfloat16 activations, six steps
