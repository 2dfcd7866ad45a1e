"""One Megatron-Core MoE layer, forward and backward: on its own dispatchers and on ours, in turns, in one run.

    torchrun --nproc-per-node 2 tools/bench_megatron.py [SHAPE ...] [--dispatchers NAME ...] [--iterations N]

Shapes: presets of tools/shapes.py (default: qwen3 dsv3 mixtral). Experts are Transformer Engine's grouped GEMMs in
bfloat16, routing is balanced and new in every iteration (`moe_router_force_load_balancing`), parameters are shared by
all candidates. Each row: median and 90th percentile over iterations of the slower rank's time, microseconds, and the
ratio to Megatron's alltoall. A candidate that cannot run says why.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from moe_ep import MoEError, close_dispatchers  # noqa: E402
from moe_ep.integrations.megatron_limits import megatron_version  # noqa: E402
from tools.shapes import PRESETS, Shape, parse_shape  # noqa: E402
from tools.timing import Stopwatch  # noqa: E402

WARM_UP = 3
NATIVE = ("megatron alltoall", "megatron flex/deepep")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["qwen3", "dsv3", "mixtral"], help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--dispatchers", nargs="+", default=["all2all", "agrs", "deepep", "nccl_ep", "direct"])
    parser.add_argument("--iterations", type=int, default=20)
    return parser.parse_args()


def config_of(shape: Shape, candidate: str, world: int) -> Any:
    """TransformerConfig of one layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    flex = candidate == NATIVE[1]
    kind: dict[str, Any] = {"moe_token_dispatcher_type": "flex" if flex else "alltoall"}
    if flex:
        kind["moe_flex_dispatcher_backend"] = "deepep"
    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.H,
        num_attention_heads=8,
        ffn_hidden_size=shape.I,
        moe_ffn_hidden_size=shape.I,
        num_moe_experts=shape.E,
        moe_router_topk=shape.K,
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_force_load_balancing=True,
        expert_model_parallel_size=world,
        expert_tensor_parallel_size=1,
        **kind,
    )


def layer_of(shape: Shape, candidate: str, world: int) -> Any:
    """One MoE layer on this rank's GPU.

    Raises:
        MoEError: a dispatcher of ours that cannot run here.
        Exception: whatever Megatron raises.
    """
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moe_ep.integrations.megatron import moe_spec

    config = config_of(shape, candidate, world)
    native = get_moe_module_spec(use_te=True, num_experts=shape.E, moe_grouped_gemm=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if candidate in NATIVE:
        submodules = getattr(native, "submodules", None) or native.keywords["submodules"]
        layer = MoELayer(config, submodules, layer_number=1, pg_collection=groups)
    else:
        layer = moe_spec(native, dispatcher=candidate, max_tokens=shape.T)(
            config=config, layer_number=1, pg_collection=groups
        )
    return layer.cuda().to(torch.bfloat16)


def candidates_of(shape: Shape, names: list[str], world: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The layers that run here, all with the first one's parameters; and why the others do not."""
    layers: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name in (*NATIVE, *names):
        reason = ""
        try:
            layers[name] = layer_of(shape, name, world)
        except (MoEError, ImportError, ValueError, RuntimeError, AssertionError) as err:
            reason = f"{type(err).__name__}: {str(err).splitlines()[0]}"
        reasons: list[str] = [""] * world
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            layers.pop(name, None)
            refused[name] = next(text for text in reasons if text)
    _share_parameters(list(layers.values()))
    return layers, refused


def _share_parameters(layers: list[Any]) -> None:
    """One copy of the weights for all layers, so that several fit into memory."""
    for other in layers[1:]:
        for (name, _), first in zip(list(other.named_parameters()), list(layers[0].parameters()), strict=True):
            path, _, leaf = name.rpartition(".")
            setattr(other.get_submodule(path), leaf, first)


def step(layer: Any, x: Tensor, grad: Tensor) -> Tensor:
    """Forward and backward of one micro-batch; its output."""
    y: Tensor = layer(x)[0]
    y.backward(grad)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    return y


def measure(layers: dict[str, Any], shape: Shape, iterations: int, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of each candidate's iterations, of the slower rank; the candidates take turns."""
    watch = Stopwatch(device, dist.group.WORLD)
    x = torch.randn(shape.T, 1, shape.H, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for iteration in range(WARM_UP + iterations):
        for name, layer in layers.items():
            watch.begin()
            y = step(layer, x, grad)
            watch.mark(name)
            taken = torch.tensor(watch.take()[name], device=device)
            assert y.isfinite().all(), f"{name} gave values that are not finite"
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if iteration >= WARM_UP:
                times[name].append(taken.item())
    return times


def report(title: str, times: dict[str, list[float]], refused: dict[str, str]) -> str:
    """A table of one shape."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians.get(NATIVE[0])
    lines = [f"{title}: forward + backward, us"]
    for name, median in medians.items():
        worst = sorted(times[name])[int(0.9 * (len(times[name]) - 1))]
        ratio = "" if base is None else f"  {base / median:5.2f} x"
        lines.append(f"  {name:22s} {median:9.0f}  p90 {worst:9.0f}{ratio}")
    lines += [f"  {name:22s} does not run here: {reason}" for name, reason in refused.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    args = arguments()
    shapes = {name: parse_shape(name) for name in args.shapes}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank, world = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    if rank == 0:
        print(
            f"Megatron-Core {megatron_version()}, torch {torch.__version__}, {world} x {torch.cuda.get_device_name()}"
        )
    for name, shape in shapes.items():
        layers, refused = candidates_of(shape, args.dispatchers, world)
        times = measure(layers, shape, args.iterations, device)
        if rank == 0:
            print(report(f"{name} {tuple(shape)}", times, refused), flush=True)
        del layers
        close_dispatchers(parallel_state.get_expert_model_parallel_group())
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
