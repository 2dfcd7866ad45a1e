"""The candidate that runs one whole layer, with the benchmark's routing in place of its router's choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_ep.config import MoEConfig, ReplicaConfig
from moe_ep.dispatch import build_dispatcher
from moe_ep.experts_registry import find_experts
from moe_ep.layer import MoELayer
from moe_ep.losses import RouterAux
from moe_ep.replica.build import build_runtime, check_replicas
from moe_ep.replica.runtime import Planned
from moe_ep.router import Router
from moe_ep.routing import Routing

from .bench_candidates import Candidate
from .bench_case import BOTH, Case, Figure, need_grad
from .bench_check import LAYER_SAMPLES, Check, LayerSample, check_layer, sample_tokens
from .bench_counts import RowCounts
from .bench_setting import Setting
from .rows import dtype_name
from .timing import Stopwatch


class ScriptedRouter(nn.Module):
    """The real router, with all that it computes, whose choice is replaced by the benchmark's ids.

    The weights are those of the ids of the script. With the weights of its own choice, a rounding in x that swaps two
    experts of about the same score would hand their weights, and gradients, to other experts.

    Attributes:
        script: ids [T, K] of the micro-batches to come, taken off one after the other.
    """

    def __init__(self, inner: Router) -> None:
        super().__init__()
        self.inner = inner
        self.script: list[Tensor] = []
        choose = inner._choose

        def scripted(scores_TE: Tensor, alive_T: Tensor) -> Tensor:
            choose(scores_TE, alive_T)  # which takes its time as ever
            assert self.script, "no ids to route by"
            return self.script.pop(0)

        inner._choose = scripted  # type: ignore[method-assign]

    def forward(self, x_TH: Tensor, **options: Any) -> tuple[Routing, RouterAux]:
        """As the router's own."""
        found: tuple[Routing, RouterAux] = self.inner(x_TH, **options)
        return found


class BenchLayer:
    """A MoELayer on its device, routed by a script, that keeps what its experts were handed.

    Attributes:
        counts: rows of its experts in the last run.
        kept: the plan of an iteration and where it sent the routes, for a run without a stage.
    """

    def __init__(self, candidate: Candidate, experts: str, setting: Setting, slots: int = 0) -> None:
        shape, place = setting.shape, setting.place
        self.candidate, self.slots = candidate, slots
        config = MoEConfig(
            hidden_size=shape.H, expert_intermediate_size=shape.I, num_experts=shape.E, top_k=shape.K,
            dtype=dtype_name(setting.dtype), max_tokens=shape.T, dispatcher=candidate.name, experts=experts,
            aux_loss="none", replica=ReplicaConfig(slots=slots), **{"kernels": setting.kernels} | candidate.values,
        )  # fmt: skip
        check_replicas(config, place.group)
        # which the layer then shares, as it does what copies its experts
        dispatcher = build_dispatcher(config.dispatch(place.num_ranks), place.group)
        build_runtime(config, dispatcher, find_experts(experts))
        with torch.device("meta"):  # a model's own initial values are drawn on the CPU, which takes minutes here
            module = MoELayer(config, place.group)
        self.module = module.to_empty(device=place.device)
        generator = torch.Generator(place.device).manual_seed(setting.workload.seed * 4096 + place.rank)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.normal_(0, config.init_std, generator=generator)
        self.router = ScriptedRouter(self.module.router)
        self.module.router = self.router  # type: ignore[assignment]
        self.kept: dict[int, tuple[Planned, Routing]] = {}
        self.counts = RowCounts(place, shape.E)
        self.counts.watch(self.module.experts)


class LayerCase(Case):
    """One pass of one MoELayer: router, dispatch, experts, combine."""

    def __init__(self, layer: BenchLayer, pass_: str, setting: Setting) -> None:
        super().__init__(setting)
        self.layer, self.candidate, self.pass_ = layer, layer.candidate, pass_
        self.backward = pass_ == BOTH
        self.figures = [Figure(stage=None, pass_=pass_, form=None, marks=("layer",), dispatches=1, combines=1)]
        self._y: Tensor | None = None
        self._dx: Tensor | None = None

    def clear(self) -> None:
        """See Case; gradients of parameters too."""
        self.poison(self._y, self._dx)
        self._y, self._dx = None, None
        self.layer.module.zero_grad(set_to_none=True)

    def run(self, iteration: int, watch: Stopwatch) -> None:
        """Mark "layer"."""
        self.clear()
        self.layer.router.script = [self.setting.routings[iteration].expert_ids]
        x = self.setting.x.detach().requires_grad_(self.backward)
        with torch.set_grad_enabled(self.backward):
            watch.begin()
            y = self.layer.module(x)[0]
            if self.backward:
                y.backward(self.setting.dy)
            watch.mark("layer")
        if self.backward:
            self._dx = need_grad(x, "the layer", "x")
            for name, parameter in self.layer.module.named_parameters():
                need_grad(parameter, "the layer", name)
        self._y = y.detach()
        (rows_L,) = self.layer.counts.take(self.layer.module.experts.first_expert, self.setting.num_local)
        self.expect_rows(iteration, rows_L)

    def row_values(self) -> dict[str, Any]:
        """See Case."""
        return {"S": self.layer.slots}

    @property
    def label(self) -> str:
        """See Case."""
        return f"{super().label}-S{self.layer.slots}" if self.layer.slots else super().label

    def check(self, iteration: int) -> Check:
        """See check_layer. Of the parameters' gradients only their presence is looked at, by `run`."""
        assert self._y is not None, "check before run"
        setting, tokens = self.setting, sample_tokens(self.setting.shape.T, LAYER_SAMPLES, self._y.device)
        sample = LayerSample(
            x=setting.x[tokens],
            dy=setting.dy[tokens],
            ids=setting.routings[iteration].expert_ids[tokens],
            y=self._y[tokens],
            dx=None if self._dx is None else self._dx[tokens],
        )
        return check_layer(self.layer.module, self.layer.router, setting, sample)
