"""How much of the communication hides behind computation, from the traces of all ranks.

- communication: time in which work of a dispatcher's launches ran (see `trace_parts`), with its waits for slower ranks;
- exposed: the part of it in which the same rank computed nothing; unfed: the part of that in which the compute stream
  was through with all that the host had issued, so that another schedule would not help, but a faster host would;
- hidden share: 1 - exposed / communication;
- peer wait: how much longer a communication lasted than on the rank where it was shortest, which came last to it;
- start delay: from the launch call to the kernel's start; late: the part of it after everything that the kernel had to
  wait for on its own GPU was done (what the caller had issued before the launch, the communication before it);
- compute wait: how long the compute stream stood still for want of it although its next kernel had been issued; on
  CPUs, how long the host stood in the wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from moe_ep.testing.chrome_trace import Trace, TraceError

from .intervals import total
from .rank_steps import Figures, RankStep, rank_steps
from .trace_parts import RankParts, take_apart


@dataclass(slots=True, kw_only=True)
class Run:
    """All steps of all ranks. Times are means over the steps, in microseconds."""

    ranks: dict[int, list[RankStep]]
    parts: dict[int, RankParts] = field(repr=False)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks ran on GPUs."""
        return next(iter(self.parts.values())).on_gpu

    @property
    def slowest(self) -> int:
        """The rank with the longest step."""
        return max(self.ranks, key=self.step_us)

    def step_us(self, rank: int) -> float:
        """Step time of a rank."""
        return mean(step.us for step in self.ranks[rank])

    def comm_us(self, rank: int) -> float:
        """Communication of a rank in a step."""
        return mean(total(step.comm) for step in self.ranks[rank])

    def exposed_us(self, rank: int) -> float:
        """Exposed communication of a rank in a step."""
        return mean(total(step.exposed) for step in self.ranks[rank])

    def hidden_share(self, rank: int) -> float | None:
        """1 - exposed / communication of a rank; None without communication."""
        comm = self.comm_us(rank)
        return None if comm == 0 else 1 - self.exposed_us(rank) / comm


def measure(traces: Iterable[Trace], steps: tuple[int, int] | None = None) -> Run:
    """Figures of a run.

    Args:
        traces: of different ranks of one run; each is let go of before the next is taken, if the iterable does so.
        steps: first and last step to look at; None: all.

    Raises:
        TraceError: a trace without what is measured, two traces of one rank, of different runs or of different steps.
    """
    parts = _parts(traces)
    if len({each.on_gpu for each in parts.values()}) > 1:
        raise TraceError("some of these traces are of GPUs and some of CPUs; give the ranks of one run")
    ranks = {rank: rank_steps(rank, mine, steps) for rank, mine in sorted(parts.items())}
    first, *others = ranks.values()
    for other in others:
        _require_alike(first, other, parts)
    _peer_waits([first, *others])
    return Run(ranks=ranks, parts=parts)


def _parts(traces: Iterable[Trace]) -> dict[int, RankParts]:
    """By rank. A single trace need not say its own."""
    parts = [take_apart(trace) for trace in traces]
    found: dict[int, RankParts] = {}
    for each in parts:
        rank = 0 if each.trace.rank is None and len(parts) == 1 else each.trace.rank
        if rank is None:
            raise TraceError(f"{each.trace.path} does not say its rank; name it rank0.json, rank1.json, ...")
        if rank in found:
            paths = f"{found[rank].trace.path} and {each.trace.path}"
            raise TraceError(f"{paths} are both of rank {rank}; give one for each rank")
        found[rank] = each
    return found


def _require_alike(first: list[RankStep], other: list[RankStep], parts: dict[int, RankParts]) -> None:
    """Same steps, same communication in each."""
    numbers = [[step.number for step in steps] for steps in (first, other)]
    if numbers[0] != numbers[1]:
        paths = [parts[steps[0].rank].trace.path for steps in (first, other)]
        raise TraceError(
            f"{paths[0]} has steps {numbers[0]}, {paths[1]} has {numbers[1]}; give traces of the same steps, or choose "
            "common ones with --steps"
        )
    for ours, theirs in zip(first, other, strict=True):
        apart = sorted(map(str, ours.transfers.keys() ^ theirs.transfers.keys()))
        if apart:
            raise TraceError(
                f"step {ours.number}: rank {ours.rank} has {len(ours.transfers)} communications, rank {theirs.rank} "
                f"{len(theirs.transfers)}, and {len(apart)} of them on one only, such as {apart[0]}; give the ranks of "
                "one run"
            )


def _peer_waits(ranks: Sequence[list[RankStep]]) -> None:
    """What each communication lasted beyond its shortest rank's time, among ranks of the same process group."""
    for same in zip(*ranks, strict=True):
        for key in same[0].transfers:
            groups: dict[str, list[Figures]] = {}
            for step in same:
                groups.setdefault(step.transfers[key].group, []).append(step.transfers[key])
            for mine in groups.values():
                shortest = min(total(figures.comm) for figures in mine)
                for figures in mine:
                    figures.peer_wait = total(figures.comm) - shortest if len(mine) > 1 else None


def share_by_step_times(serial: Run, overlapped: Run) -> float | None:
    """The second way: (serial step - overlapped step) / communication, of the slowest rank of each run.

    The communication is that of the overlapped run. None without communication.

    Raises:
        TraceError: the runs do not do the same work: other ranks, or other communications in a step.
    """
    if serial.ranks.keys() != overlapped.ranks.keys() or serial.on_gpu != overlapped.on_gpu:
        raise TraceError(
            f"the serial run has ranks {[*serial.ranks]}, the other {[*overlapped.ranks]}; give the same ranks on the "
            "same devices"
        )
    work = [_work(run) for run in (serial, overlapped)]
    if work[0] != work[1]:
        apart = next(iter((work[0] - work[1]) + (work[1] - work[0])))
        raise TraceError(
            f"the serial run has {work[0][apart]} times {' '.join(map(str, apart))} in its first step, the other "
            f"{work[1][apart]}; both must send the same micro-batches through the same layers"
        )
    slowest = overlapped.slowest
    comm = overlapped.comm_us(slowest)
    return None if comm == 0 else (serial.step_us(serial.slowest) - overlapped.step_us(slowest)) / comm


def _work(run: Run) -> Counter[tuple[str, int | None, str]]:
    """How often each communication of the first step occurs, whichever number its micro-batch has."""
    (step, *_), *_ = run.ranks.values()
    return Counter((key.label.stage, key.label.layer, key.label.direction) for key in step.transfers)
