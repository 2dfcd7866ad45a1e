"""Training and interleaving on two GPUs: the same curve as all2all, the same bits as one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from moe_ep.dispatch import unavailable_reasons
from moe_ep.testing.ranks import RankPool
from moe_ep.testing.table_deepep import FORMS
from moe_ep.testing.table_nccl_ep import LAYOUTS
from tests.gpu.small_training import Setup, excess, interleaved_equals_serial, make_config, train

CANDIDATES = {f"deepep {form}": Setup(dispatcher="deepep", options=options) for form, options in FORMS.items()}
CANDIDATES |= {f"nccl_ep {layout}": Setup(dispatcher="nccl_ep", options=(("layout", layout),)) for layout in LAYOUTS}
pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=240.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def noise(pool: RankPool) -> list[list[float]]:
    """all2all's curve, and four more of it with the tokens in another order: the same sums, added up differently."""
    return [pool.run(train, Setup(dispatcher="all2all", shuffle=seed))[0] for seed in range(5)]


def why_not(group: dist.ProcessGroup, rank: int, setup: Setup) -> str:
    return "; ".join(unavailable_reasons(make_config(setup).dispatch(), group))


@pytest.fixture(params=CANDIDATES)
def setup(pool: RankPool, request: pytest.FixtureRequest) -> Setup:
    """A candidate that can run here."""
    chosen = CANDIDATES[request.param]
    reasons: str = pool.run(why_not, chosen)[0]
    if reasons:
        pytest.skip(f"{request.param}: {reasons}")
    return chosen


def test_the_loss_curve_is_all2alls_within_the_noise_of_sums(
    pool: RankPool, setup: Setup, noise: list[list[float]]
) -> None:
    curve: list[float] = pool.run(train, setup)[0]
    assert curve[-1] < curve[0] / 2, "it does not learn"
    assert excess(curve, noise) <= 1


def test_a_run_without_the_weights_gradient_leaves_the_noise(pool: RankPool, noise: list[list[float]]) -> None:
    curve = pool.run(train, Setup(dispatcher="all2all", cut_weights=True))[0]
    assert excess(curve, noise) > 1


def test_interleaved_micro_batches_give_the_bits_of_serial_ones(pool: RankPool, setup: Setup) -> None:
    assert pool.run(interleaved_equals_serial, setup) == [[], []]
