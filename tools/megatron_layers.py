"""Megatron-Core's MoE layer on its own dispatchers and on ours, with the benchmark's routing in place of its choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ep.errors import MoEError

from .bench_candidates import Candidate
from .bench_setting import Problem, Setting, agree
from .timing import Stopwatch

NATIVE = Candidate("megatron", (("dispatcher", "alltoall"),))
FLEX = Candidate("megatron", (("dispatcher", "deepep"),))
LAYER = "layer"  # the mark of its time


class ScriptedChoice:
    """What Megatron's router asks for its top-k in place of its own RouterReplay.

    The router computes all that it always does; its choice is thrown away, its scores at the script's ids are kept.

    Attributes:
        ids: int64 [T, K] of the micro-batch to come.
    """

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.layer_number: int | None = None  # which Megatron sets

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """(scores, ids) [T, K]."""
        default_compute_topk(scores, topk, num_groups, group_topk)
        assert self.ids is not None, "no ids to route by"
        return scores.gather(1, self.ids), self.ids


class MegatronCase:
    """Forward and backward of one layer, whose parameters it may share with others."""

    def __init__(self, candidate: Candidate, layer: Any, setting: Setting) -> None:
        self.candidate, self.layer, self.setting = candidate, layer, setting
        self.x = setting.x.unsqueeze(1).requires_grad_()
        self.y: Tensor | None = None
        self.choice = ScriptedChoice()
        layer.router.router_replay = self.choice

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """One micro-batch."""
        self.choice.ids = self.setting.routings[iteration].expert_ids
        watch.begin()
        y = self.layer(self.x)[0]
        y.backward(self.setting.dy.view_as(y))
        watch.mark(LAYER)
        self.y = y.detach()

    def clear(self) -> None:
        """Let go of the last iteration."""
        self.x.grad = self.y = None
        self.layer.zero_grad(set_to_none=True)

    def results(self) -> dict[str, Tensor | None]:
        """Output and gradients of x and of the experts; None: there is none."""
        experts = {name: parameter.grad for name, parameter in self.layer.experts.named_parameters()}
        return {"y": self.y, "dx": self.x.grad, **experts}


def differing(found: dict[str, Tensor | None], native: dict[str, Tensor | None], setting: Setting) -> tuple[float, str]:
    """The largest error relative to the native layer's norm, and a sentence where one is out of bounds, else "".

    y and dx are sums of K rows that are the same on both sides: at most K - 1 additions and a rounding, each by eps / 2
    of a partial sum, on either side, so eps K. A weight's gradient is a float32 sum over an expert's rows, the same in
    perhaps another order, rounded once: eps, and the number of rows times 2^-23.
    """
    eps, rows = torch.finfo(setting.dtype).eps, int(setting.counts.max())
    worst = 0.0
    for name, want in native.items():
        got = found[name]
        if want is None or got is None:
            return float("nan"), f"{name} has no value"
        error = float((got.float() - want.float()).norm() / want.float().norm())
        bound = eps * setting.shape.K if name in ("y", "dx") else eps + rows * 2.0**-23
        if not error <= bound:
            return error, f"{name} differs from Megatron's own by {error:.1e} of its norm, more than {bound:.1e}"
        worst = max(worst, error)
    return worst, ""


def config_of(setting: Setting, candidate: Candidate) -> Any:
    """TransformerConfig of one layer: Transformer Engine's grouped experts on a GPU, one after the other without."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape, on_gpu = setting.shape, setting.place.device.type == "cuda"
    flex = candidate == FLEX
    kind: dict[str, Any] = {"moe_token_dispatcher_type": "flex" if flex else "alltoall"}
    if flex:
        kind["moe_flex_dispatcher_backend"] = "deepep"
    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.H,
        num_attention_heads=1,
        ffn_hidden_size=shape.I,
        moe_ffn_hidden_size=shape.I,
        num_moe_experts=shape.E,
        moe_router_topk=shape.K,
        moe_grouped_gemm=on_gpu,
        moe_permute_fusion=on_gpu,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=not on_gpu,
        bf16=setting.dtype == torch.bfloat16,
        params_dtype=setting.dtype,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=setting.place.num_ranks,
        expert_tensor_parallel_size=1,
        **kind,
    )


def layer_of(setting: Setting, candidate: Candidate) -> Any:
    """One MoE layer on this rank's device.

    Raises:
        MoEError: a dispatcher of ours that cannot run here.
        Exception: whatever Megatron raises.
    """
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moe_ep.integrations.megatron import moe_spec

    config, on_gpu = config_of(setting, candidate), setting.place.device.type == "cuda"
    native = get_moe_module_spec(use_te=on_gpu, num_experts=setting.shape.E, moe_grouped_gemm=on_gpu)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if candidate in (NATIVE, FLEX):
        submodules = getattr(native, "submodules", None) or native.keywords["submodules"]
        layer: Any = MoELayer(config, submodules, layer_number=1, pg_collection=groups)
    else:
        given = {"kernels": setting.kernels, **candidate.values}
        given["options"] = dict(given["options"])
        made = moe_spec(native, dispatcher=candidate.name, max_tokens=setting.shape.T, **given)
        layer = made.module(
            config=config, submodules=made.submodules, layer_number=1, pg_collection=groups, **made.params
        )
    return layer.to(setting.place.device, setting.dtype)


def layers_of(setting: Setting, candidates: Sequence[Candidate]) -> tuple[list[MegatronCase], dict[Candidate, Problem]]:
    """The layers that run here, all with the first one's parameters; and why the others do not. Collective."""
    cases: list[MegatronCase] = []
    lost: dict[Candidate, Problem] = {}
    for candidate in candidates:
        layer, problem = attempt(lambda candidate=candidate: layer_of(setting, candidate), setting)  # type: ignore[misc]
        if problem is None:
            if cases:
                _share_parameters(layer, cases[0].layer)
            cases.append(MegatronCase(candidate, layer, setting))
        else:
            lost[candidate] = problem
    return cases, lost


def attempt(make: Callable[[], Any], setting: Setting) -> tuple[Any, Problem | None]:
    """What it gives, and on every rank alike what it raised on any: a refusal, or a lack of memory. Collective."""
    made, problem = None, None
    try:
        made = make()
    except torch.OutOfMemoryError as err:
        problem = ("oom", f"out of memory: {str(err).splitlines()[0]}")
    except (MoEError, ImportError, ValueError, RuntimeError, AssertionError) as err:  # the latter four are Megatron's
        problem = ("refused", f"{type(err).__name__}: {(str(err).splitlines() or [''])[0]}")
    return made, agree(problem, setting.place)


def _share_parameters(layer: Any, first: Any) -> None:
    """One copy of the weights for all layers, so that several fit into memory."""
    for (name, _), parameter in zip(list(layer.named_parameters()), list(first.parameters()), strict=True):
        path, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(path), leaf, parameter)
