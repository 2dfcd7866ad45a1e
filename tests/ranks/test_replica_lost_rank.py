"""A rank killed or stopped while copies are planned, sent or reduced: the others raise in time and say where."""

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
from moe_ep.replica.exchange import Exchange
from moe_ep.replica.messages import GroupTransport
from moe_ep.testing.ranks import RankError, RankPool
from tests.ranks.test_fault_matrix import BOUND_S, SIGNALS, TIMEOUT_S, VICTIM, WORLD, leave_file, strike, wait_for_files
from tests.ranks.test_field_reports_peers import make, rows

# where the fault strikes: which method, at which call; and what the survivors wait for then
PHASES: dict[str, tuple[type, str, int, str]] = {
    "before loads": (Exchange, "gather", 0, "exchange of loads of layer 7, micro-batch 0"),
    "before plans are compared": (Exchange, "gather", 1, "comparison of plans of layer 7, micro-batch 0"),
    # weights are under way behind these, which are waited for first
    "before weight_sync": (GroupTransport, "_push", 0, "exchange of counts of layer 7, micro-batch 0"),
    "before weight_sync again": (GroupTransport, "_push", 1, "backward of combine of layer 7, micro-batch 0"),
    "before grad_reduce": (GroupTransport, "_pull", 0, "grad_reduce of replicas (layer 7, micro-batch 0)"),
}
FAST = ("killed", "before grad_reduce")
CASES = [(name, phase) for name in SIGNALS for phase in PHASES]


def at_call(owner: type, method: str, number: int, event: Callable[[], None]) -> Any:
    """A patch that calls `event` before the `number`-th call of a method."""
    real, calls = getattr(owner, method), list[int]()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number + 1:
            event()
        return real(self, *args, **options)

    return mock.patch.object(owner, method, call)


def train_and_lose_one(group: dist.ProcessGroup, rank: int, case: tuple[str, str], where: str) -> None:
    """One good step with copies, then the fault."""
    name, phase = case
    folder, arrived = Path(where), list[float]()
    make(None)(rows(1).requires_grad_())[0].sum().backward()  # what a first step imports takes longer than a second
    dist.barrier(group=group)
    short = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=TIMEOUT_S))
    layer = make(short, dispatcher="all2all", num_experts=2 * WORLD, replica=dict(slots=2))
    x = rows(24, rank).requires_grad_()
    y, said = layer(x)
    y.sum().backward()
    copies = said.replicas.clone()
    dist.all_reduce(copies, group=short)
    assert copies > 0, "nothing is sent"
    event = functools.partial(strike, folder, rank, SIGNALS[name], arrived)
    with contextlib.ExitStack() as patches:
        patches.enter_context(at_call(*PHASES[phase][:3], event))
        with pytest.raises(PeerError) as caught:
            layer(x)[0].sum().backward()
    seconds, lanes = time.monotonic() - arrived[0], layer.dispatcher.lanes
    with pytest.raises(PeerError):  # and whoever tries again gets an answer, too
        layer(x)
    layer.replicas.check_returned()
    leave_file(folder, f"left{rank}", json.dumps([str(caught.value), seconds, lanes.num_lanes - lanes.num_free]))
    if rank == 0 and name == "stopped":
        wait_for_files(folder, "left", [peer for peer in range(WORLD) if peer != VICTIM])
        os.kill(int((folder / f"at{VICTIM}").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != FAST)) for case in CASES], ids=" ".join
)
def test_a_rank_lost_among_copies_is_an_error_in_time_that_names_the_phase(
    case: tuple[str, str], tmp_path: Path
) -> None:
    with RankPool(WORLD, timeout_s=60) as pool, pytest.raises(RankError) as caught:
        pool.run(train_and_lose_one, case, str(tmp_path))
    assert list(caught.value.failures) == [VICTIM], f"the others fail otherwise or hang: {caught.value}"
    limit = BOUND_S + (TIMEOUT_S if case[0] == "stopped" else 0)  # a closed connection is noticed at once
    for rank in set(range(WORLD)) - {VICTIM}:
        message, seconds, lent = json.loads((tmp_path / f"left{rank}").read_text())
        assert message.startswith(f"{PHASES[case[1]][3]}: communication with the other ranks failed ("), message
        assert seconds < limit and lent == 0
