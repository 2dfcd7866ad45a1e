"""Routers: from the rows of one micro-batch to its `Routing`, its auxiliary losses and its load.

All of it is float32 whatever the model's dtype, autocast included, and nothing reads a value on the host. A router
knows no ranks and makes no collective: whoever owns the optimizer's step sums the load counters over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from .config import MoEConfig
from .errors import InputError, RecipeError
from .initial import SHARED_EXPERT_ID, generator_for, normal_
from .losses import RouterAux, balance_loss, router_aux, sequence_length, z_loss
from .recompute import choose_experts, even_experts, replayed
from .router_product import masked_logits
from .routing import Routing
from .schema import nearest, require
from .scoring import SMALLEST_SUM, by_kernels, weigh_routes

ROUTER_ID = SHARED_EXPERT_ID - 1  # stands for a layer's router where its initial values are drawn


class Router(nn.Module):
    """Base of the routers: a linear map to E logits, a choice of K experts, their weights, losses and counters.

    `kernels`, False until the layer sets it, lets the CUDA kernels do what is elementwise (see `moe_ep.scoring`).

    `weight` float32 [E, H] keeps its dtype through `.to()`, `.bfloat16()` and the like. `load_E` int64 [E] sums the
    routes of training forwards, neither of evaluation nor of recompute, until `take_load`. It is no buffer on
    purpose: DistributedDataParallel would overwrite every rank's counts by those of rank 0.

    Args:
        config: the layer's configuration.
        layer_index: seeds the initial weights together with the seed; independent of rank.
        rank, num_ranks: with force_balance, ranks with equal T interleave their patterns so that the sum of their
            loads is even, too; otherwise unused.
    """

    weight: nn.Parameter
    load_E: Tensor

    def __init__(self, config: MoEConfig, layer_index: int, *, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__()
        untrained = config.top_k == 1 and config.normalize_weights and not config.force_balance
        require(
            not untrained or config.aux_loss_coef > 0 or config.z_loss_coef > 0,
            "top_k = 1 with normalize_weights = true makes every weight 1, so that nothing trains the router; set "
            "normalize_weights = false, or a loss coefficient",
        )
        self.config, self.layer_index = config, layer_index
        self.rank, self.num_ranks = rank, num_ranks
        self.kernels = False
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.load_E = torch.zeros(config.num_experts, dtype=torch.int64)
        self.reset_parameters(0)

    def reset_parameters(self, seed: int) -> None:
        """Weights from normal(0, init_std), a function of (seed, layer_index) only; counters to zero."""
        normal_(self.weight, self.config.init_std, generator_for(seed, self.layer_index, ROUTER_ID))
        self.load_E.zero_()

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Scores that the weights are read from: float32 [T, E] of float32 [T, E]."""
        raise NotImplementedError

    def ranking(self, scores_TE: Tensor) -> Tensor:
        """What the choice goes by; no gradient passes here."""
        return scores_TE

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Rows that sum to 1, for the load-balancing loss."""
        return scores_TE

    def forward(
        self, x_TH: Tensor, *, valid_T: Tensor | None = None, num_sequences: int = 1
    ) -> tuple[Routing, RouterAux]:
        """Route one micro-batch.

        Args:
            x_TH: [T, H], any float dtype; T may be 0.
            valid_T: bool [T], False for padding: ids -1, weight 0, in no loss and no counter, whatever its row holds.
            num_sequences: B, the T tokens are B sequences of T/B tokens (for the sequence-level loss).

        Returns:
            The routing and its `RouterAux`. A token with a NaN or infinite logit gets ids -1 and weights 0 and is
            counted in `routing.bad_tokens`; the dispatcher raises for it, on every rank.

        Raises:
            InputError: wrong shape, dtype or device, or a router parameter that is not float32.
        """
        self._check(x_TH, valid_T, num_sequences)
        if valid_T is not None:  # padding may hold NaN, which would reach the weight's gradient as 0 * NaN
            x_TH = x_TH.masked_fill(~valid_T[:, None], 0)
        c, kernels = self.config, by_kernels(x_TH, self.kernels)
        logits_TE, alive_T, bad_tokens, num_tokens = masked_logits(x_TH, self.weight, valid_T, kernels=kernels)
        scores_TE = self.scores(logits_TE)
        ids_TK = self._choose(scores_TE, alive_T)
        weights_TK, load_E = weigh_routes(
            scores_TE, ids_TK, normalize=c.normalize_weights, scale=c.routed_scale, kernels=kernels
        )
        routing = Routing(expert_ids=ids_TK, weights=weights_TK, num_experts=c.num_experts, bad_tokens=bad_tokens)
        self._count(load_E)
        loss = self._balance_loss(scores_TE, ids_TK, alive_T, num_sequences, load_E, kernels)
        z = z_loss(logits_TE, alive_T) if self.config.z_loss_coef > 0 else None
        return routing, router_aux(self.config, loss, z, load_E, num_tokens)

    def take_load(self) -> Tensor:
        """Routes per expert since the last call, int64 [E], of this rank; sets the counter to zero."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E

    def _choose(self, scores_TE: Tensor, alive_T: Tensor) -> Tensor:
        c = self.config
        if c.force_balance:
            return replayed(lambda: even_experts(alive_T, c.top_k, c.num_experts, self.rank, self.num_ranks))
        ranking_TE = self.ranking(scores_TE.detach())
        groups = max(c.num_groups, 1)
        return replayed(lambda: choose_experts(ranking_TE, alive_T, c.top_k, groups, kernels=self.kernels))

    def _balance_loss(
        self, scores_TE: Tensor, ids_TK: Tensor, alive_T: Tensor, num_sequences: int, load_E: Tensor, kernels: bool
    ) -> Tensor | None:
        if self.config.aux_loss == "none" or self.config.aux_loss_coef == 0:
            return None
        pieces = num_sequences if self.config.aux_loss == "sequence" else 1
        probs_TE = self.probabilities(scores_TE)
        return balance_loss(probs_TE, ids_TK, alive_T, num_sequences=pieces, load_E=load_E, kernels=kernels)

    def _count(self, load_E: Tensor) -> None:
        # recompute runs this forward again inside a backward pass: the engine's task id tells
        if self.training and torch._C._current_graph_task_id() == -1:
            # FSDP2 moves parameters and buffers without `_apply`, so the counter follows at the first count
            self.load_E = self.load_E.to(load_E.device).add_(load_E)

    def _check(self, x_TH: Tensor, valid_T: Tensor | None, num_sequences: int) -> None:
        if x_TH.dim() != 2 or x_TH.shape[1] != self.config.hidden_size or not x_TH.is_floating_point():
            raise InputError(
                f"x must be a float tensor [T, {self.config.hidden_size}], got {tuple(x_TH.shape)} {x_TH.dtype}; "
                "flatten batch and sequence into T"
            )
        if x_TH.device != self.weight.device:
            raise InputError(f"x is on {x_TH.device}, the router's weight on {self.weight.device}; move one of them")
        if valid_T is not None and (
            valid_T.dtype != torch.bool or valid_T.shape != x_TH.shape[:1] or valid_T.device != x_TH.device
        ):
            raise InputError(
                f"valid_T must be bool [{x_TH.shape[0]}] on {x_TH.device}, got {valid_T.dtype} "
                f"{tuple(valid_T.shape)} on {valid_T.device}; pass one flag per token"
            )
        own = (*self._parameters.items(), *self._buffers.items())  # quicker than the walk through all modules below
        for name, tensor in own if not self._modules else (*self.named_parameters(), *self.named_buffers()):
            if tensor is not None and tensor.dtype != torch.float32:
                raise InputError(
                    f"router {name} of layer {self.layer_index} is {tensor.dtype}, must be float32; exclude the router "
                    "from mixed precision (FSDP2: its own fully_shard without param_dtype) and do not load it by assign"
                )
        sequence_length(x_TH.shape[0], num_sequences)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        self.load_E = keep_dtype(self.load_E)
        return self


class SoftmaxRouter(Router):
    """Softmax over all E experts, then the K most probable ones (Qwen3-MoE, `Qwen3MoeTopKRouter` of transformers).

    With `num_groups` = G (the "grouped" router) the choice is the top K/G inside each of G groups of consecutive
    experts, columns in group order; with K == G == R column j belongs to rank j, so that every rank computes exactly
    one route of every token (XTuner's grouped router, InternLM/xtuner#1245).
    """

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Softmax over all experts."""
        return logits_TE.softmax(-1)


class SigmoidRouter(Router):
    """Sigmoid scores and a selection bias that steers load without a loss (arXiv:2408.15664, DeepSeek-V3).

    `bias` float32 [E], a persistent buffer that keeps its dtype, is added for the choice only; weights come from the
    unbiased scores.
    """

    bias: Tensor

    def __init__(self, config: MoEConfig, layer_index: int, **ranks: Any) -> None:
        super().__init__(config, layer_index, **ranks)
        self.register_buffer("bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def reset_parameters(self, seed: int) -> None:
        """As the base; the bias to zero."""
        super().reset_parameters(seed)
        if "bias" in self._buffers:  # the base's constructor calls this before the buffer exists
            self.bias.zero_()

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Sigmoid of each logit."""
        return logits_TE.sigmoid()

    def ranking(self, scores_TE: Tensor) -> Tensor:
        """Biased scores."""
        return scores_TE + self.bias

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Unbiased scores divided by their sum."""
        return scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)

    @torch.no_grad()
    def update_bias(self, global_load_E: Tensor) -> None:
        """bias += bias_update_rate * sign(mean load - load); sets the counter to zero. Once per optimizer step.

        Args:
            global_load_E: int64 [E], routes of the whole global batch: `load_E` summed over all ranks.

        Raises:
            InputError: wrong shape or dtype.
        """
        if global_load_E.shape != self.bias.shape or global_load_E.dtype != torch.int64:
            raise InputError(
                f"global load must be int64 [{self.config.num_experts}], got {global_load_E.dtype} "
                f"{tuple(global_load_E.shape)}; sum load_E over all ranks"
            )
        # in integers: a float32 mean of large counts would move experts that carry exactly the mean
        step = (global_load_E.sum() - self.config.num_experts * global_load_E).sign()
        self.bias += self.config.bias_update_rate * step
        self.load_E.zero_()


ROUTERS: dict[str, type[Router]] = {"softmax": SoftmaxRouter, "sigmoid": SigmoidRouter, "grouped": SoftmaxRouter}


def build_router(config: MoEConfig, layer_index: int, *, rank: int = 0, num_ranks: int = 1) -> Router:
    """Router named by `config.router`; arguments as for `Router`.

    Raises:
        RecipeError: unknown name.
    """
    if config.router not in ROUTERS:
        raise RecipeError(f"router {config.router!r} is unknown; {nearest(config.router, ROUTERS)}")
    return ROUTERS[config.router](config, layer_index, rank=rank, num_ranks=num_ranks)
