"""A rank that is killed or stopped in any phase of a layer: the others raise PeerError in time and say in which phase.

One case runs in the fast tier; the whole matrix, and the same in the pretraining program, in the slow one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moe_ep import PeerError
from moe_ep.dispatch.agrs import Agrs
from moe_ep.dispatch.all2all import All2All
from moe_ep.dispatch.transfer import Flight
from moe_ep.experts import GroupedExperts
from moe_ep.testing.ranks import RankError, RankPool
from tests.ranks.launch import start
from tests.ranks.small_recipe import write
from tests.ranks.test_field_reports_peers import make, rows

WORLD, VICTIM = 3, 1
TIMEOUT_S = 3.0  # of the group
BOUND_S = 2.0  # beyond it: how late a busy machine may wake a rank
DISPATCHERS = ["all2all", "agrs"]
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# where the fault strikes, and what the survivors wait for then
PHASES = {
    "before counts": "exchange of {early} of layer 7, micro-batch 0",
    "before dispatch": "dispatch of layer 7, micro-batch 0",
    "inside experts": "combine of layer 7, micro-batch 0",
    "before combine": "combine of layer 7, micro-batch 0",
    "in backward before combine": "backward of combine of layer 7, micro-batch 0",
    "in backward before dispatch": "backward of dispatch of layer 7, micro-batch 0",
}
FAST = ("killed", "before combine", "all2all")
SLOW = [case for s in SIGNALS for p in PHASES for d in DISPATCHERS if (case := (s, p, d)) != FAST]


def before(owner: type, method: str, event: Callable[[], None], what: str = "") -> Any:
    """A patch that calls `event` before each call of a method; of a Flight, only where it carries `what`."""
    real = getattr(owner, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not what or self._what.startswith(what):
            event()
        return real(self, *args, **options)

    return mock.patch.object(owner, method, call)


def hooks(phase: str, event: Callable[[], None]) -> list[Any]:
    """Patches of this process that call `event` in a phase."""
    if phase == "before counts":
        return [before(All2All, "_send_counts", event), before(Agrs, "_send_ids", event)]
    if phase == "inside experts":
        return [before(GroupedExperts, "forward", event)]
    method = "launch_backward" if "backward" in phase else "launch_forward"
    return [before(Flight, method, event, phase.split()[-1])]


def wait_for_files(folder: Path, name: str, ranks: list[int]) -> None:
    """Until every rank of `ranks` has left its file."""
    end = time.monotonic() + 10
    while not all((folder / f"{name}{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, f"no {name} of all ranks"
        time.sleep(0.01)


def leave_file(folder: Path, name: str, text: str) -> None:
    """At once and whole, for whoever waits for it."""
    (folder / f"{name}.part").write_text(text)
    (folder / f"{name}.part").rename(folder / name)


def strike(folder: Path, rank: int, number: int, arrived: list[float]) -> None:
    """The victim goes when all others have come as far; what it sent before has arrived then."""
    leave_file(folder, f"at{rank}", str(os.getpid()))
    if rank == VICTIM:
        wait_for_files(folder, "at", list(range(WORLD)))
        time.sleep(0.1)  # the others are now waiting
        os.kill(os.getpid(), number)
    arrived.append(time.monotonic())


def train_and_lose_one(group: dist.ProcessGroup, rank: int, case: tuple[str, str, str], where: str) -> None:
    """One good step, then the fault. Survivors leave (message, seconds, lanes lent) and free the pool of the victim."""
    name, phase, dispatcher = case
    folder, arrived = Path(where), list[float]()
    make(None)(rows(1).requires_grad_())[0].sum().backward()  # what a first step imports takes longer than a second
    dist.barrier(group=group)
    short = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=TIMEOUT_S))
    layer = make(short, dispatcher=dispatcher, num_experts=2 * WORLD)
    x = rows(24, rank).requires_grad_()  # so many that every rank gets rows of every other one
    layer(x)[0].sum().backward()
    with contextlib.ExitStack() as patches:
        for patch in hooks(phase, functools.partial(strike, folder, rank, SIGNALS[name], arrived)):
            patches.enter_context(patch)
        with pytest.raises(PeerError) as caught:
            layer(x)[0].sum().backward()
    seconds, lanes = time.monotonic() - arrived[0], layer.dispatcher.lanes
    with pytest.raises(PeerError):  # and whoever tries again gets an answer, too
        layer(x)
    leave_file(folder, f"left{rank}", json.dumps([str(caught.value), seconds, lanes.num_lanes - lanes.num_free]))
    if rank == 0 and name == "stopped":
        survivors = [peer for peer in range(WORLD) if peer != VICTIM]
        wait_for_files(folder, "left", survivors)
        os.kill(int((folder / f"at{VICTIM}").read_text()), signal.SIGKILL)


def check(case: tuple[str, str, str], folder: Path) -> None:
    name, phase, dispatcher = case
    with RankPool(WORLD, timeout_s=60) as pool, pytest.raises(RankError) as caught:
        pool.run(train_and_lose_one, case, str(folder))
    assert list(caught.value.failures) == [VICTIM], f"the others fail otherwise or hang: {caught.value}"
    assert "exit code -9" in caught.value.failures[VICTIM]
    wanted = PHASES[phase].format(early="counts" if dispatcher == "all2all" else "ids")
    limit = BOUND_S + (TIMEOUT_S if name == "stopped" else 0)  # a closed connection is noticed at once
    for rank in set(range(WORLD)) - {VICTIM}:
        message, seconds, lent = json.loads((folder / f"left{rank}").read_text())
        assert message.startswith(f"{wanted}: communication with the other ranks failed (")
        assert seconds < limit and lent == 0


def test_a_killed_rank_is_an_error_in_time_that_names_the_phase(tmp_path: Path) -> None:
    check(FAST, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=" ".join)
def test_a_lost_rank_in_every_phase_is_an_error_in_time_that_names_it(
    case: tuple[str, str, str], tmp_path: Path
) -> None:
    check(case, tmp_path)


PROGRAM_TIMEOUT_S = 6


def lose_one_in_the_program(rank: int, *, name: str, phase: str, folder: str) -> None:
    """The victim goes at the second call of step 3, which has one for each of two layers and two micro-batches."""
    calls = list[int]()

    def event() -> None:
        calls.append(1)
        if len(calls) == 2 * 2 * 2 + 2:
            leave_file(Path(folder), "struck", str(time.time()))
            os.kill(os.getpid(), SIGNALS[name])

    for patch in hooks(phase, event) if rank == VICTIM else []:
        patch.start()


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_the_program_ends_with_3_in_time_wherever_a_rank_is_lost(
    tmp_path: Path, dispatcher: str, phase: str, name: str
) -> None:
    overrides = [f"moe.dispatcher={dispatcher}", "parallel.ep_size=2", f"train.timeout_s={PROGRAM_TIMEOUT_S}"]
    prepare = functools.partial(lose_one_in_the_program, name=name, phase=phase, folder=str(tmp_path))
    job = start(2, [str(write(tmp_path)), *overrides, "checkpoint.every=0"], tmp_path, prepare=prepare)
    try:
        job.processes[0].join(60)
        ended = time.time()
        assert job.processes[0].exitcode == 3, job.text()
    finally:
        job.processes[0].kill()
        job.processes[VICTIM].kill()
    # the group's own timeout, or the heartbeat, which looks four times in it
    limit = BOUND_S + (1.25 * PROGRAM_TIMEOUT_S if name == "stopped" else 0)
    assert ended - float((tmp_path / "struck").read_text()) < limit
    said = ["another rank failed or was lost"] + ["rank 1 gave no sign of life for 6 s"] * (name == "stopped")
    assert any(text in job.text(0) for text in said), job.text(0)
