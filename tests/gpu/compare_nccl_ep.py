"""Times `nccl_ep` against bare calls of its library, and prints one short table. Under torchrun on 2 GPUs or more:

    torchrun --nproc-per-node 2 tests/gpu/compare_nccl_ep.py [SHAPE ...]

Both get the same ids, weights and rows, count rows on the host where the other does, and end with rows grouped by
expert (the flat layout is expanded by our row movement on both sides). Microseconds of the slower rank, median; the
rest is what our adapter adds: fault words, tickets, autograd, memory of its own for every micro-batch.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import build_dispatcher, close_dispatchers
from moe_ep.dispatch.nccl_ep_library import library, make_communicator
from moe_ep.dispatch.nccl_ep_sizes import make_sizes
from moe_ep.ops import choose_kernels
from moe_ep.permute import gather_rows, sort_routes, sum_rows
from moe_ep.routing import Routing
from tools.shapes import PRESETS

FORMS: dict[str, dict[str, Any]] = {
    "expert_major": {},
    "expert_major, fixed budget": {"capacity_factor": 1.5},
    "flat": {"options": (("layout", "flat"),)},
}
Marks = list[torch.cuda.Event]


def timed(step: Callable[[], Marks], iterations: int = 20, warmup: int = 4) -> list[float]:
    """Median microseconds between successive events that `step` returns, slower rank."""
    taken = []
    for iteration in range(warmup + iterations):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        marks = step()
        torch.cuda.synchronize()
        if iteration >= warmup:
            taken.append([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)])
    table = torch.tensor(taken, device="cuda")
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    medians: list[float] = table.median(0).values.tolist()
    return medians


def mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Bare:
    """The library's own calls with buffers made once; what follows them in the flat layout is our row movement."""

    def __init__(self, config: DispatchConfig, group: dist.ProcessGroup, x: torch.Tensor, routing: Routing) -> None:
        self.ep, self.comm = library(), make_communicator(group)
        self.sizes = sizes = make_sizes(config, group.size(), x.element_size())
        self.kernels = choose_kernels(config, group)
        self.x, self.ids, self.weights = x, routing.expert_ids, routing.weights
        ep = self.ep
        policy = ep.OverflowPolicy.DROP if sizes.budget else ep.OverflowPolicy.AUTO
        self.group = ep.Group.create(self.comm, ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=sizes.num_experts,
            max_dispatch_tokens_per_rank=sizes.max_tokens, max_recv_tokens_per_rank=sizes.budget or 0,
            max_token_bytes=sizes.row_bytes, overflow_policy=policy, num_topk=0 if sizes.flat else sizes.top_k,
        ))  # fmt: skip
        self.counts = torch.zeros(sizes.local_experts + 1, device="cuda", dtype=torch.int32)
        self.info = ep.LayoutInfo(
            expert_counters=ep.Tensor(self.counts[:-1]), recv_total_counter=ep.Tensor(self.counts[-1:])
        )
        layout = ep.Layout.FLAT if sizes.flat else ep.Layout.EXPERT_MAJOR
        stream = torch.cuda.current_stream()
        self.handle = self.group.create_handle(
            layout, ep.Tensor(self.ids), layout_info=self.info, config=ep.HandleConfig(), stream=stream
        )
        self.rows = sizes.budget or int(self.counts[-1])
        self.make_buffers()

    def make_buffers(self) -> None:
        ep, flat = self.ep, self.sizes.flat
        self.received = self.x.new_empty(self.rows, self.x.shape[1])
        self.got = torch.zeros((self.rows, self.sizes.top_k) if flat else self.rows, device="cuda")
        self.got_ids = torch.full((self.rows, self.sizes.top_k), -1, device="cuda") if flat else None
        self.outputs = ep.DispatchOutputs(
            tokens=ep.Tensor(self.received), topk_weights=ep.Tensor(self.got),
            topk_idx=None if self.got_ids is None else ep.Tensor(self.got_ids),
        )  # fmt: skip
        self.inputs = ep.DispatchInputs(tokens=ep.Tensor(self.x), topk_weights=ep.Tensor(self.weights))
        self.y = torch.empty_like(self.x)

    def step(self) -> Marks:
        ep, stream = self.ep, torch.cuda.current_stream()
        marks = [mark()]
        self.handle.update(ep.Tensor(self.ids), layout_info=self.info, stream=stream)
        if self.sizes.budget is None:
            counts = self.counts.tolist()
        self.handle.dispatch(self.inputs, self.outputs, config=ep.DispatchConfig(), stream=stream)
        rows, back = self.received, self.received
        if self.got_ids is not None:
            routes = sort_routes(self.got_ids, self.sizes.local_experts, kernels=self.kernels)
            index = routes.row_token[: sum(counts[:-1])]
            rows = gather_rows(rows, index, routes.positions, bound=routes.bound, kernels=self.kernels)
        marks.append(mark())
        if self.got_ids is not None:
            back = sum_rows(rows, index, routes.positions, bound=routes.bound, kernels=self.kernels)
        combined = ep.CombineOutputs(tokens=ep.Tensor(self.y))
        self.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(back)), combined, config=ep.CombineConfig(), stream=stream
        )
        return [*marks, mark()]

    def close(self) -> None:
        torch.cuda.synchronize()
        self.handle.destroy()
        self.group.destroy()
        self.comm.destroy()


class Ours:
    """The same through the dispatcher; forward alone, or with backward."""

    def __init__(
        self, config: DispatchConfig, group: dist.ProcessGroup, x: torch.Tensor, routing: Routing, backward: bool
    ) -> None:
        self.dispatcher = build_dispatcher(config, group)
        self.x, self.ids, self.weights = x, routing.expert_ids, routing.weights
        self.backward, self.num_experts = backward, config.num_experts
        self.dy = torch.randn_like(x)

    def step(self) -> Marks:
        x, weights = (t.detach().requires_grad_(self.backward) for t in (self.x, self.weights))
        d = self.dispatcher
        with torch.set_grad_enabled(self.backward):
            marks = [mark()]
            routing = Routing(expert_ids=self.ids, weights=weights, num_experts=self.num_experts)
            ticket = d.dispatch_preprocess(x, routing)
            d.dispatch(ticket)
            rows = d.dispatch_postprocess(ticket).rows()
            marks.append(mark())
            d.combine_preprocess(ticket, rows)
            d.combine(ticket)
            self.y = d.combine_postprocess(ticket)
            marks.append(mark())
        if self.backward:
            self.y.backward(self.dy)
            marks.append(mark())
        return marks


def compare(name: str, form: str, group: dist.ProcessGroup) -> str:
    """One line of the table."""
    tokens, hidden, _, experts, top_k = PRESETS[name]
    generator = torch.Generator().manual_seed(100 + group.rank())
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices.cuda()
    routing = Routing(
        expert_ids=ids, weights=torch.rand(tokens, top_k, generator=generator).cuda(), num_experts=experts
    )
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().cuda()
    config = DispatchConfig(
        name="nccl_ep", num_experts=experts, top_k=top_k, hidden_size=hidden, dtype="bfloat16", max_tokens=tokens,
        **FORMS[form],
    )  # fmt: skip
    bare = Bare(config, group, x, routing)
    plain = timed(bare.step)
    expected = bare.y.clone()
    bare.close()
    ours = Ours(config, group, x, routing, backward=False)
    forward = timed(ours.step)
    same = torch.equal(ours.y, expected)
    train = timed(Ours(config, group, x, routing, backward=True).step)
    close_dispatchers(group)
    ratios = [a / b for a, b in zip(forward, plain, strict=True)]
    return (
        f"{name:<8} {form:<27} bare {plain[0]:5.0f} + {plain[1]:5.0f}   ours {forward[0]:5.0f} + {forward[1]:5.0f}   "
        f"ratio {ratios[0]:.2f} {ratios[1]:.2f} (sum {sum(forward) / sum(plain):.2f})   train "
        f"{train[0]:5.0f} + {train[1]:5.0f}, backward {train[2]:5.0f}   {'same bits' if same else 'OTHER BITS'}"
    )


def main() -> None:
    """Measure every shape and form, then print."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None, "no process group"
    lines = []
    for name in sys.argv[1:] or ["dsv3", "qwen3", "mixtral"]:
        for form in FORMS:
            try:
                lines.append(compare(name, form, group))
            except Exception as err:
                lines.append(f"{name:<8} {form:<27} FAILED {type(err).__name__}: {str(err)[:300]}")
                raise
            finally:
                if group.rank() == 0:
                    print(lines[-1], flush=True)
    if group.rank() == 0:
        print(
            "\nmicroseconds, median of the slower rank: dispatch to expert rows + combine", *lines, sep="\n", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
