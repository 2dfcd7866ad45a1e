"""Field reports of ranks, programs and compilers on GPUs. See docs/field_reports.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEConfig, MoELayer, Routing, build_dispatcher, close_dispatchers
from moe_ep.testing.ranks import RankPool
from tests.ranks.launch import PROGRAM
from tests.ranks.small_recipe import write

TOKENS, H, E, K = 96, 64, 8, 2
SIZES: dict[str, Any] = dict(hidden_size=H, expert_intermediate_size=32, num_experts=E, top_k=K, max_tokens=TOKENS)
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def pool_of_two(timeout_s: float = 120) -> RankPool:
    return RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=timeout_s)


class Block(torch.nn.Module):
    """Something to compile in front of the layer and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(H)
        self.moe = MoELayer(MoEConfig(**SIZES, aux_loss_coef=0.01, init_std=0.2))
        self.moe.reset_parameters(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, aux = self.moe(self.norm(x))
        return (x + y).tanh() + aux.loss


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_block_and_a_compiled_router(whole: bool) -> None:
    """PrimeIntellect-ai/prime-rl#996: the compiler's own kernels around the layer, or in its router."""
    torch._dynamo.reset()
    plain, compiled = Block().cuda(), Block().cuda()
    assert plain.moe.router.kernels, "the router's kernels are in use"
    run = torch.compile(compiled) if whole else compiled
    if not whole:
        compiled.moe.router = torch.compile(compiled.moe.router)  # type: ignore[assignment]
    for step, length in enumerate((48, 48, 33)):
        x = torch.randn(length, H, generator=torch.Generator().manual_seed(step)).cuda().requires_grad_()
        found = []
        for forward, block in ((plain, plain), (run, compiled)):
            block.zero_grad()
            y = forward(x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in block.parameters())])
            x.grad = None
        for one, other in zip(*found, strict=True):  # sums over H, I and K and some ten steps, in another order
            assert float((one - other).norm()) <= (H + 32 + K + 10) * 2.0**-23 * float(other.norm())
    torch._dynamo.reset()


def hundred_combines(group: dist.ProcessGroup, rank: int, name: str) -> int:
    config = MoEConfig(**SIZES, dispatcher=name, dtype="bfloat16").dispatch(2)
    dispatcher = build_dispatcher(config, group)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, H, generator=generator).bfloat16().cuda()
    ids = torch.rand(TOKENS, E, generator=generator).argsort(1)[:, :K].cuda()
    weights = torch.rand(TOKENS, K, generator=generator).cuda()
    first, wrong = None, 0
    for _ in range(100):
        ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=ids, weights=weights, num_experts=E))
        dispatcher.dispatch(ticket)
        inp = dispatcher.dispatch_postprocess(ticket)
        rows = inp.rows()
        dispatcher.combine_preprocess(ticket, rows * inp.row_weights[: len(rows), None].to(rows.dtype))
        dispatcher.combine(ticket)
        y = dispatcher.combine_postprocess(ticket)
        first = y.clone() if first is None else first
        wrong += int((y != first).sum())
    close_dispatchers(group)
    return wrong


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["all2all", "agrs", "direct"])
def test_a_hundred_combines_have_the_same_bits(name: str) -> None:
    """pytorch/torchtitan#1974, pytorch/torchtitan#2775, NVIDIA/Megatron-LM#5718: atomics would not add up alike."""
    with pool_of_two() as pool:
        assert pool.run(hundred_combines, name) == [0, 0]


SCRIPT = f"""
import json, torch
from moe_ep import MoEConfig, MoELayer, close_dispatchers
from recipes.ranks import start

ranks = start("auto", 2, 60.0, {{}}, "where.py")
layer = MoELayer(MoEConfig(**{SIZES!r}), ranks.ep_group).to(ranks.device)
layer.reset_parameters(0)
y, _ = layer(torch.randn(5, {H}, device=ranks.device))
y.sum().backward()
device = torch.cuda.current_device()
found = {{
    "device": str(y.device),
    "uuid": str(torch.cuda.get_device_properties(device).uuid),
    "elsewhere": torch.cuda.memory_reserved(1 - device),
}}
open(f"rank{{ranks.rank}}.json", "w").write(json.dumps(found))
close_dispatchers(ranks.ep_group)
torch.distributed.destroy_process_group()
"""


@pytest.mark.gpu(2, apart=True)
def test_a_rank_takes_the_gpu_of_its_local_rank_among_the_visible_ones(tmp_path: Path) -> None:
    """pytorch/torchtitan#1229, deepspeedai/DeepSpeed#7266, xdit-project/xDiT#731, pytorch/pytorch#178977."""
    said = {}
    for order in ("0,1", "1,0"):
        folder = tmp_path / order
        folder.mkdir()
        script = folder / "where.py"
        script.write_text(SCRIPT)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": order, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*LAUNCH, str(script)], env=environment, cwd=folder, check=True, timeout=150)
        said[order] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for order, ranks in said.items():
        assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"], order
        assert all(rank["elsewhere"] == 0 for rank in ranks), "memory on the other rank's GPU"
    assert said["0,1"][0]["uuid"] == said["1,0"][1]["uuid"] != said["0,1"][1]["uuid"]


def late_kernels(group: dist.ProcessGroup, rank: int, cache: str) -> tuple[bool, list[str]]:
    if rank == 1:
        os.environ["XDG_CACHE_HOME"] = cache
    layer = MoELayer(MoEConfig(**SIZES, dispatcher="all2all"), group).cuda()
    layer.reset_parameters(0)
    y, _ = layer(torch.randn(7, H, device="cuda"))
    y.sum().backward()
    close_dispatchers(group)
    return layer.dispatcher.kernels, sorted(path.suffix for path in Path(cache).rglob("*"))


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_rank_that_has_to_compile_first_keeps_the_others_waiting_and_no_longer(tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM#17376: kernels are compiled where a layer is built, before its first collective of rows."""
    with pool_of_two(300) as pool:
        (here, _), (there, files) = pool.run(late_kernels, str(tmp_path))
    assert here and there and ".so" in files


def first_thing(group: dist.ProcessGroup, rank: int, api: str) -> str:
    from moe_ep.dispatch import unavailable_reasons

    sizes = SIZES | dict(hidden_size=512, dtype="bfloat16")
    config = MoEConfig(**sizes, dispatcher="deepep", options=(("api", api),)).dispatch(2)
    reasons = unavailable_reasons(config, group)
    if reasons:
        return "; ".join(reasons)
    dispatcher = build_dispatcher(config, group)  # before anything else has used the group
    x = torch.ones(4, 512, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.tensor([[0, 7]] * 4, device="cuda"), torch.ones(4, K, device="cuda")
    ticket = dispatcher.dispatch_preprocess(x, Routing(expert_ids=ids, weights=weights, num_experts=E))
    dispatcher.dispatch(ticket)
    dispatcher.combine_preprocess(ticket, dispatcher.dispatch_postprocess(ticket).rows())
    dispatcher.combine(ticket)
    y = dispatcher.combine_postprocess(ticket)
    assert bool((y == 2).all())
    close_dispatchers(group)
    return ""


@pytest.mark.gpu(2)
@pytest.mark.parametrize("api", ["v1", "v2"])
def test_deepep_as_the_first_thing_that_uses_a_group(api: str) -> None:
    """deepseek-ai/DeepEP#726, NVIDIA/Megatron-LM#5153: the group's NCCL communicator must exist."""
    with pool_of_two() as pool:
        reasons = pool.run(first_thing, api)
    if any(reasons):
        pytest.skip(reasons[0])
    assert reasons == ["", ""]


@pytest.mark.gpu(2, apart=True)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_program_on_two_gpus_trains_as_one_rank_does(tmp_path: Path, ep_size: int) -> None:
    """huggingface/transformers#48208, pytorch/pytorch#167178: FSDP2, clipping, the fused optimizer."""
    losses = []
    for name, launch, size, accumulation in (("two", LAUNCH, ep_size, 1), ("one", (sys.executable,), 1, 2)):
        folder = tmp_path / name
        folder.mkdir()
        given = [
            "parallel.backend=auto", f"parallel.ep_size={size}", "train.steps=6",
            f"train.gradient_accumulation={accumulation}", "train.clip_norm=0.5", "metrics.every=1",
        ]  # fmt: skip
        command = [*launch, str(PROGRAM), str(write(folder)), *given]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1" if name == "two" else "0"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
        losses.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert len(losses[0]) == 6
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)
