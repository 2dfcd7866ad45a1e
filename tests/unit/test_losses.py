"""Balance and z-loss: closed forms, masks, levels, and independence of how a batch is cut into pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import MoELayer, total_aux_loss
from moe_ep.config import MoEConfig
from moe_ep.errors import InputError, RecipeError
from moe_ep.losses import RouterAux, balance_loss, z_loss
from moe_ep.recompute import choose_experts
from moe_ep.router import build_router
from moe_ep.routing import Routing

H, E, K = 8, 6, 2


def config(**changes: object) -> MoEConfig:
    values = {"hidden_size": H, "expert_intermediate_size": 4, "num_experts": E, "top_k": K, "init_std": 1.0}
    return MoEConfig(**(values | changes))


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def top(probs: Tensor, top_k: int = K) -> Tensor:
    return choose_experts(probs, torch.ones(len(probs), dtype=torch.bool), top_k, 1)


def everyone(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def graph_size(tensor: Tensor) -> int:
    """Number of autograd nodes behind a tensor."""
    seen: set[object] = set()
    todo = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return len(seen)


def test_balanced_routing_costs_one_and_a_collapse_e_over_k() -> None:
    """NVIDIA/Megatron-LM#1617: a loss that stays at its balanced value whatever the routing."""
    even = torch.tensor([[0, 1], [2, 3], [4, 5]])
    uniform = torch.full((3, E), 1 / E)
    assert balance_loss(uniform, even, everyone(3)).item() == pytest.approx(1)
    onto_two = torch.zeros(3, E)
    onto_two[:, :K] = 1 / K
    assert balance_loss(onto_two, torch.tensor([[0, 1]] * 3), everyone(3)).item() == pytest.approx(E / K)


def test_each_layer_is_imbalanced_on_its_own() -> None:
    """huggingface/transformers#28255: concatenated layers, one on expert 0 and one on expert 1, look balanced."""
    layers = [torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[0.0, 1.0]] * 4)]
    assert [balance_loss(p, top(p, 1), everyone(4)).item() for p in layers] == [2, 2]
    pooled = torch.cat(layers)
    assert balance_loss(pooled, top(pooled, 1), everyone(8)).item() == 1


def test_batch_level_equals_transformers_up_to_its_factor_k() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    logits, valid = rows(10, 1) @ rows(E, 2).T, everyone(10)
    valid[[2, 7]] = False
    for mask in (everyone(10), valid):
        theirs = qwen.load_balancing_loss_func((logits,), E, K, mask[None].long())
        probs = logits.softmax(-1)
        ours = balance_loss(probs, choose_experts(probs, mask, K, 1), mask)
        assert ours.item() == pytest.approx(theirs.item() / K, rel=1e-6)


def test_token_count_is_tokens_in_one_process() -> None:
    """InternLM/xtuner#1528: T = 10 tokens of E = 4 experts, where the number of experts was taken for the tokens."""
    probs = rows(10)[:, :4].softmax(-1)
    ids = top(probs)
    share = torch.bincount(ids.flatten(), minlength=4) / 20
    expected = 4 * (share * probs.mean(0)).sum()
    assert balance_loss(probs, ids, everyone(10)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_sequence_level_equals_a_loop_over_sequences() -> None:
    probs, valid = rows(12, 3).softmax(-1)[:, :E], everyone(12)
    probs = probs / probs.sum(-1, keepdim=True)
    valid[[3, 9, 10, 11]] = False
    ids = choose_experts(probs, valid, K, 1)
    total = 0.0
    for s in range(0, 12, 4):
        tokens = [t for t in range(s, s + 4) if valid[t]]
        share = [sum(e in ids[t] for t in tokens) / (K * len(tokens)) for e in range(E)]
        mean = [sum(probs[t, e].item() for t in tokens) / len(tokens) for e in range(E)]
        total += len(tokens) * E * sum(f * p for f, p in zip(share, mean, strict=True))
    value = balance_loss(probs, ids, valid, num_sequences=3).item()
    assert value == pytest.approx(total / 8, rel=1e-5)
    assert value != pytest.approx(balance_loss(probs, ids, valid).item(), rel=1e-3)


def test_counts_come_from_the_ids_given() -> None:
    """A second top-k of the probabilities would see other experts than the ones that a bias or a group chose."""
    probs = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 2)
    assert balance_loss(probs, torch.tensor([[3], [3]]), everyone(2)).item() == pytest.approx(0.4)
    router = build_router(config(router="sigmoid", aux_loss_coef=1.0), 0)
    x = rows(16)
    before = router(x)[1].aux_loss
    router.bias[0] = 10.0  # now every token takes expert 0
    _, aux = router(x)
    scores = (x @ router.weight.T).sigmoid()
    probs = scores / scores.sum(-1, keepdim=True)
    expected = E * (aux.load / (16 * K) * probs.mean(0)).sum()
    assert aux.load[0] == 16
    assert aux.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert aux.aux_loss != before


def test_z_loss_is_the_mean_square_of_logsumexp() -> None:
    logits, valid = rows(5) @ rows(E, 2).T, everyone(5)
    valid[1] = False
    expected = logits[valid].double().exp().sum(-1).log().square().mean()
    assert z_loss(logits, valid).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "grouped"])
@pytest.mark.parametrize("level", ["batch", "sequence"])
def test_padding_is_in_no_loss(router: str, level: str) -> None:
    """Tokens with NaN rows that are marked as padding change nothing, in value and gradient."""
    groups = {"num_groups": 2} if router == "grouped" else {}
    module = build_router(config(router=router, aux_loss=level, aux_loss_coef=0.5, z_loss_coef=0.1, **groups), 0)
    x = rows(6)
    padded = torch.full((10, H), float("nan"))
    padded[[0, 1, 2, 5, 6, 7]] = x
    valid = ~padded.isnan().any(-1)
    results = []
    for inputs, mask in ((x, None), (padded, valid)):
        module.weight.grad = None
        _, aux = module(inputs, valid_T=mask, num_sequences=2)
        aux.loss.backward()
        results.append((aux.loss.detach(), module.weight.grad, aux.num_tokens))
    torch.testing.assert_close(results[0], results[1])


def total_and_gradient(level: str, cuts: list[slice], coefs: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Loss of 16 tokens in 4 sequences, of which 5 + 11 count, cut into pieces weighted by their valid tokens."""
    module = build_router(config(aux_loss=level, **coefs), 0)
    x, valid = rows(16), everyone(16)
    valid[5:8] = valid[14:] = False
    total = torch.zeros(())
    for cut in cuts:
        _, aux = module(x[cut], valid_T=valid[cut], num_sequences=(cut.stop - cut.start) // 4)
        total = total + aux.loss * aux.num_tokens / valid.sum()
    total.backward()
    assert module.weight.grad is not None
    return total.detach(), module.weight.grad


@pytest.mark.parametrize("coefs", [{"aux_loss_coef": 1e-2}, {"z_loss_coef": 1e-2}], ids=["aux", "z"])
def test_effective_coefficient_does_not_depend_on_the_pieces(coefs: dict[str, float]) -> None:
    """NVIDIA/Megatron-LM#3768: pieces with unequal valid tokens, one rank or four, accumulated or not."""
    whole = total_and_gradient("sequence", [slice(0, 16)], coefs)
    for cuts in ([slice(0, 8), slice(8, 16)], [slice(0, 4), slice(4, 16)], [slice(s, s + 4) for s in range(0, 16, 4)]):
        torch.testing.assert_close(total_and_gradient("sequence", cuts, coefs), whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_no_coefficient_no_graph(router: str) -> None:
    """NVIDIA/Megatron-LM#5694, verl-project/verl#4103: a coefficient that nobody set must not act."""
    module = build_router(config(router=router), 0)
    plain, aux = module(rows(4))
    assert module.config.aux_loss_coef == module.config.z_loss_coef == 0
    assert aux.loss.grad_fn is None and not aux.loss.requires_grad and aux.loss.dtype == torch.float32
    assert (aux.loss, aux.aux_loss, aux.z_loss) == (0, 0, 0)
    both, on = build_router(config(router=router, aux_loss_coef=1e-3, z_loss_coef=1e-3), 0)(rows(4))
    assert on.loss.grad_fn is not None
    assert graph_size(plain.weights) == graph_size(both.weights)


def test_one_loss_off_leaves_the_other_alone() -> None:
    only_aux = build_router(config(aux_loss_coef=0.5), 0)(rows(4))[1]
    only_z = build_router(config(z_loss_coef=0.25), 0)(rows(4))[1]
    both = build_router(config(aux_loss_coef=0.5, z_loss_coef=0.25), 0)(rows(4))[1]
    assert only_aux.z_loss == 0 and only_z.aux_loss == 0
    torch.testing.assert_close(both.loss, only_aux.loss + only_z.loss)
    torch.testing.assert_close(both.loss, 0.5 * both.aux_loss + 0.25 * both.z_loss)
    assert not both.aux_loss.requires_grad and not both.z_loss.requires_grad


def test_logged_values_are_unscaled_and_apart() -> None:
    """mlfoundations/open_lm#255, NVIDIA/Megatron-LM#1585: a log that mixes coefficient or accumulation into a loss."""
    small, large = (build_router(config(aux_loss_coef=c, z_loss_coef=c), 0)(rows(8))[1] for c in (1e-3, 1.0))
    assert small.aux_loss == large.aux_loss and small.z_loss == large.z_loss
    module = build_router(config(aux_loss="sequence", aux_loss_coef=1.0), 0)
    whole = module(rows(8), num_sequences=4)[1]
    pieces = [module(rows(8)[s : s + 2])[1] for s in range(0, 8, 2)]
    mean = sum(p.aux_loss * p.num_tokens for p in pieces) / sum(p.num_tokens for p in pieces)
    torch.testing.assert_close(mean, whole.aux_loss)


def test_a_level_of_none_with_a_coefficient_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"aux_loss_coef = 0.01 needs aux_loss = 'batch' or 'sequence', got 'none'"):
        config(aux_loss="none", aux_loss_coef=0.01)


@pytest.mark.parametrize("count", [0, 3])
def test_sequences_must_divide_the_tokens(count: int) -> None:
    with pytest.raises(InputError, match=f"num_sequences = {count} must divide the 4 tokens"):
        build_router(config(), 0)(rows(4), num_sequences=count)


@pytest.mark.parametrize("level", ["batch", "sequence"])
@pytest.mark.parametrize("masked", [False, True])
def test_no_tokens_cost_nothing_and_stay_in_the_graph(level: str, masked: bool) -> None:
    """Every rank takes part in backward, also the one without a token (or with padding only)."""
    module = build_router(config(aux_loss=level, aux_loss_coef=1.0, z_loss_coef=1.0), 0)
    x = rows(4) if masked else rows(0)
    valid = torch.zeros(4, dtype=torch.bool) if masked else None
    result: tuple[Routing, RouterAux] = module(x, valid_T=valid, num_sequences=2)
    aux = result[1]
    aux.loss.backward()
    assert (aux.loss, aux.num_tokens, aux.load.sum()) == (0, 0, 0)
    assert module.weight.grad is not None and not module.weight.grad.any()


def test_the_loss_of_a_model_takes_the_list_of_one_micro_batch() -> None:
    _, aux = MoELayer(config(aux_loss_coef=1.0), None)(rows(4))
    assert total_aux_loss([aux, aux]) == 2 * aux.loss
    with pytest.raises(InputError, match=r"got one MoEAux; pass \[aux\] for a single layer"):
        total_aux_loss(aux)
    with pytest.raises(InputError, match=r"got a list of list; .* each micro-batch of a DominoStack by itself"):
        total_aux_loss([[aux], [aux]])  # type: ignore[list-item]
