"""What a case does with a dispatcher, on a rank. Everything here makes the same collective calls on every rank.

A driver returns passes (what one micro-batch produced) and problems (what it saw to be wrong by itself). Nothing is
compared with the oracle here: `judge.py` does that in the parent, after all ranks are done.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..dispatch import build_dispatcher, close_dispatchers
from ..errors import MoEError, RecipeError, Unavailable
from .bench import Bench, MicroBatch, Report
from .cases import Case
from .expert_rows import leave_nan_behind, poisoned_allocations
from .misuse import drive_fault, drive_protocol


def drive_repeat(bench: Bench) -> None:
    """Twice the same micro-batch, the second time in poisoned memory: the two must agree bit for bit."""
    bench.micro_batch(0).run()
    again = bench.micro_batch(0)
    with poisoned_allocations():
        leave_nan_behind(bench.device)
        again.forward()
        leave_nan_behind(bench.device)
        again.backward()
    again.record()


def drive_steps(bench: Bench) -> None:
    """Several steps with another T each, in poisoned memory."""
    with poisoned_allocations():
        for step in range(int(bench.case.argument)):
            leave_nan_behind(bench.device)
            bench.micro_batch(step).run()


def drive_schedule(bench: Bench) -> None:
    """Stages of several micro-batches in the order that the argument spells, backward jointly or one by one."""
    order, _, backward = bench.case.argument.partition(" | ")
    batches: dict[int, MicroBatch] = {}
    with torch.set_grad_enabled(bench.case.grads != "none"):
        for step in order.split():
            batch = batches.setdefault(int(step[1]), bench.micro_batch(int(step[1])))
            stages: dict[str, Callable[[], None]] = {
                "p": batch.preprocess, "d": batch.dispatch, "e": batch.experts, "c": batch.combine, "f": batch.finish
            }  # fmt: skip
            stages[step[0]]()
    if backward == "joint":
        torch.autograd.backward([b.y for b in batches.values()], [b.gradient() for b in batches.values()])
    elif backward != "none":
        for index in backward.split():
            batches[int(index)].backward()
    for batch in batches.values():
        batch.record()


def drive_source(bench: Bench) -> None:
    """The rows of one micro-batch stay as they are while others come and go."""
    first = bench.micro_batch(0)
    first.preprocess()
    first.dispatch()
    inp = first.receive()
    before = [t.detach().clone() for t in (inp.source, inp.row_weights)]
    for index in (1, 2):
        bench.micro_batch(index).run()
    after = [t.detach() for t in (inp.source, inp.row_weights)]
    # as bytes: what lies behind the counts may be NaN
    if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True)):
        bench.report.problems.append("source or row_weights changed while other micro-batches were in flight")
    first.compute(inp)
    first.combine()
    first.finish()
    first.backward()
    first.record()


def drive_recompute(bench: Bench) -> None:
    """All six stages inside an activation checkpoint. With early stop the second ticket is abandoned half-way."""
    batch = bench.micro_batch(0)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        batch.forward()
        return batch.y

    with set_checkpoint_early_stop(bench.case.argument == "early stop"):
        batch.y = checkpoint(layer, batch.x, batch.weights, use_reentrant=False)
        batch.backward()
    batch.record()
    bench.micro_batch(1).run()


def drive_abandoned(bench: Bench) -> None:
    """Tickets dropped after each stage, some beside one that goes on; then normal ones work and lanes came back."""
    for num_stages in range(1, 6):
        dropped = bench.micro_batch(num_stages)
        for stage in (dropped.preprocess, dropped.dispatch, dropped.experts, dropped.combine)[:num_stages]:
            stage()
        if num_stages == 5:
            dropped.finish()  # a forward whose backward never comes
        normal = bench.micro_batch(0)
        normal.forward()
        del dropped  # counting references must do: a cycle would keep the lane until some collection
        normal.backward()
        normal.record()
    lanes = bench.dispatcher.lanes
    if lanes.num_free != lanes.num_lanes:
        bench.report.problems.append(f"{lanes.num_lanes - lanes.num_free} of {lanes.num_lanes} lanes never came back")


def drive_backward_twice(bench: Bench) -> None:
    """Two backward passes over one graph give twice the gradients; halving them is exact."""
    batch = bench.micro_batch(0).forward()
    batch.y.backward(batch.gradient(), retain_graph=True)
    batch.backward()
    for leaf in (batch.x, batch.weights, *batch.params):
        if leaf.grad is not None:
            leaf.grad /= 2
    batch.record()


def drive_memory(bench: Bench) -> None:
    """After backward nothing holds a micro-batch's tensors: neither its finished ticket nor the dispatcher."""
    batch = bench.micro_batch(0)
    batch.preprocess()
    batch.dispatch()
    inp = batch.receive()
    batch.compute(inp)
    batch.combine()
    batch.finish()
    ticket = batch.ticket
    names = ("x", "weights", "ids", "source", "y")
    refs = [weakref.ref(t) for t in (batch.x, batch.weights, batch.ids, inp.source, batch.y)]
    batch.backward()
    batch.record()
    del batch, inp
    held = [name for name, ref in zip(names, refs, strict=True) if ref() is not None]
    if held:
        bench.report.problems.append(f"{', '.join(held)} outlived the micro-batch (ticket: {ticket.stage.label})")
    bench.micro_batch(1).run()


def run_case(
    group: dist.ProcessGroup, rank: int, name: str, case: Case, device: str, modules: Sequence[str] = ()
) -> Report:
    """Build the dispatcher and drive it through the case. Runs on a rank; see `contract.check`."""
    for module in modules:
        importlib.import_module(module)
    ep_group = group if case.group else None
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    try:
        dispatcher = build_dispatcher(case.dispatch_config(name), ep_group)
    except (RecipeError, Unavailable) as err:
        return Report(refusal=f"{type(err).__name__}: {err}")
    bench = Bench(case, dispatcher, rank, where)
    try:
        DRIVERS[case.driver](bench)
    except MoEError as err:  # what a back end refuses by its values, it refuses with the first micro-batch
        bench.report.refusal = f"{type(err).__name__}: {err}"
    finally:
        dispatcher.close()
        close_dispatchers(ep_group)
    return bench.report


DRIVERS: dict[str, Callable[[Bench], None]] = {
    "repeat": drive_repeat,
    "steps": drive_steps,
    "schedule": drive_schedule,
    "source": drive_source,
    "recompute": drive_recompute,
    "abandoned": drive_abandoned,
    "backward twice": drive_backward_twice,
    "memory": drive_memory,
    "protocol": drive_protocol,
    "fault": drive_fault,
}
