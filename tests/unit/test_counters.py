"""Load counters and the selection bias: training forwards count once, nothing else does."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor

from moe_ep.config import MoEConfig
from moe_ep.errors import InputError
from moe_ep.router import Router, build_router

H, E, K = 8, 6, 2
KINDS = {"softmax": {}, "sigmoid": {"bias_update_rate": 0.1}, "grouped": {"num_groups": 2}}


def config(**changes: object) -> MoEConfig:
    values = {"hidden_size": H, "expert_intermediate_size": 4, "num_experts": E, "top_k": K, "init_std": 1.0}
    return MoEConfig(**(values | changes))


def make(kind: str, **changes: object) -> Router:
    return build_router(config(router=kind, **(KINDS[kind] | changes)), 0)


def rows(count: int, seed: int = 0, width: int = H) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_evaluation_leaves_counters_alone() -> None:
    """PrimeIntellect-ai/prime-rl#2953: validation traffic must not steer the next bias update."""
    with_eval, without = make("sigmoid"), make("sigmoid")
    for router, evaluations in ((with_eval, 3), (without, 0)):
        router.train()
        router(rows(8))
        router.eval()
        for step in range(evaluations):
            with torch.no_grad():
                router(rows(50, seed=9 + step))
            router(rows(50, seed=19 + step))
        router.train()
        router(rows(8, seed=1))
        assert router.load_E.sum() == 16 * K
        router.update_bias(router.load_E.clone())
    assert torch.equal(with_eval.bias, without.bias) and with_eval.bias.any()


def test_counters_sum_micro_batches_until_taken() -> None:
    router = make("softmax")
    loads = [router(rows(5, seed=s))[1].load for s in range(3)]
    assert torch.equal(router.load_E, sum(loads)) and router.load_E.dtype == torch.int64
    taken = router.take_load()
    assert torch.equal(taken, sum(loads)) and not router.load_E.any()
    router(rows(5))
    assert torch.equal(taken, sum(loads))


def test_nothing_is_kept_between_steps() -> None:
    """databricks/megablocks#69, pytorch/torchtitan#979: saved losses or maps that grow with every forward."""
    router = make("sigmoid", bias_update_rate=0.0, aux_loss_coef=1.0)

    def alive() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    router(rows(4))[1].loss.backward()
    before = alive()
    for _ in range(100):
        router(rows(4))[1].loss.backward()
    assert alive() == before
    assert {type(v) for v in vars(router).values() if isinstance(v, torch.Tensor)} == {torch.Tensor}
    router.eval()
    count = router.load_E.clone()
    router(rows(4))
    assert torch.equal(router.load_E, count) and not router.bias.any()


def test_counters_are_out_of_reach_of_buffer_broadcasts() -> None:
    """NVIDIA-NeMo/Automodel#3247: counters are side effects; DistributedDataParallel copies rank 0's buffers to all."""
    router = make("sigmoid")
    assert [name for name, _ in router.named_buffers()] == ["bias"]
    clone = copy.deepcopy(router)
    clone(rows(3))
    assert clone.load_E.sum() == 3 * K and not router.load_E.any()


@pytest.mark.gpu
def test_counters_follow_weights_that_were_moved_without_them() -> None:
    router = make("softmax")
    router.weight.data = router.weight.data.cuda()
    for _ in range(2):
        router(rows(3).cuda())
    assert router.load_E.is_cuda and router.load_E.sum() == 6 * K


def test_bias_moves_by_the_sign_of_the_missing_load() -> None:
    router = make("sigmoid", bias_update_rate=0.25)
    router(rows(4))
    router.update_bias(torch.tensor([10, 0, 5, 5, 5, 5]))
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0] and not router.load_E.any()
    big = torch.tensor([2**40 + 1, 2**40 - 1, 2**40, 2**40, 2**40, 2**40])
    router.update_bias(big)
    assert router.bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0]
    for wrong in (torch.zeros(E), torch.zeros(E + 1, dtype=torch.int64)):
        with pytest.raises(InputError, match=rf"global load must be int64 \[{E}\]"):
            router.update_bias(wrong)


def test_bias_updates_balance_a_skewed_router() -> None:
    """arXiv:2408.15664: the bias alone, without a loss, evens out loads that the scores skew."""
    router = make("sigmoid", bias_update_rate=0.01)
    x = rows(300)
    x[:, 0] = 2
    with torch.no_grad():
        router.weight.mul_(0.3)
        router.weight[0, 0] += 1
    first = router(x)[1].load
    for _ in range(200):
        router.update_bias(router.take_load() if router.load_E.any() else first)
        router(x)
    last = router(x)[1].load
    assert first.max() / first.double().mean() > 2 and last.max() / last.double().mean() < 1.15


def test_sums_over_ranks_steer_like_one_process() -> None:
    whole, parts = make("sigmoid"), [make("sigmoid") for _ in range(2)]
    x = rows(10)
    whole(x)
    parts[0](x[:3])
    parts[1](x[3:])
    total = parts[0].take_load() + parts[1].take_load()
    assert torch.equal(total, whole.load_E)
    for router in (whole, *parts):
        router.update_bias(total)
    assert torch.equal(whole.bias, parts[0].bias) and torch.equal(whole.bias, parts[1].bias) and whole.bias.any()
