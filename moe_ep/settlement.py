"""How ranks end together when one of them fails: a small protocol over the store of their process group.

The failing rank says why. The others stop where they are, which they can only do once the communication that they wait
for has completed; so every rank tells the others what it has started, and whoever has stopped makes up for what it has
not started itself, with rows of all bits set (NaN; nobody looks at them). When all have stopped at the same number of
collectives and these have ended, all are where a new step can begin. A rank that does not stop, because it waits for
the failing one in a collective that is not ours, ends the attempt after `PATIENCE_S`: then every rank raises all the
same, and the group is given up. It is given up, too, once a rank has started what nobody can make up for; then what
waits on the ranks' GPUs is told to stop (`end_waits`).

Runs on a thread of its own (`moe_ep.alarm`), knows nothing of dispatchers, and works with any c10d store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch._C._distributed_c10d import PrefixStore, Store

from .calls import Call, CallLog, counterpart

PATIENCE_S = 5.0  # without any progress of any rank
_POLL_S = 0.005
_RAISED = "raised"


class Started(Protocol):
    """A collective under way."""

    def has_ended(self) -> bool:
        """Whether it has, without waiting; on a GPU, whether all that was started before it has ended too."""
        ...

    def wait_on_host(self) -> Any:
        """Wait for it."""
        ...


# make_up(log, call) starts a call on the group of log number `log`; with None it starts nothing
MakeUp = Callable[[int, Call | None], Started]


@dataclass
class Party:
    """This rank, as the thread that settles sees it.

    Attributes:
        logs: of each process group that our collectives run on.
        error: why this rank fails, None where it does not.
        stopped: it starts nothing more.
        unlogged: it has started what stands in no log, so that nobody can make up for it: the group is given up.
    """

    rank: int
    num_ranks: int
    logs: list[CallLog] = field(default_factory=lambda: [CallLog()])
    error: str | None = None
    stopped: bool = False
    unlogged: bool = False


class Outcome(NamedTuple):
    """How it ended: the errors of ranks, and whether all ranks have met, so that the group serves on."""

    errors: dict[int, str]
    met: bool


class _State(NamedTuple):
    """What a rank says of itself: whether it has stopped, is done, how many collectives it has started, its error.

    `unlogged`: as in `Party`.
    """

    stopped: bool
    done: bool
    counts: list[int]
    error: str | None
    unlogged: bool


def first_error(store: Store, generation: int) -> dict[int, str]:
    """A rank that has said that it fails, and why; empty: none has."""
    store = _numbered(store, generation)
    if not store.check([_RAISED]):
        return {}
    rank, error = json.loads(store.get(_RAISED))
    return {rank: error}


def _numbered(store: Store, generation: int) -> Store:
    return PrefixStore(str(generation), store)


class Settlement:
    """One attempt to end together, the `generation`-th of the group.

    Args:
        store: of the group's alarm.
        generation: number of the attempt.
        party: this rank.
        make_up: starts a call.
        end_waits: ends on all ranks what waits for a peer outside of the logs; called once, if at all.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        party: Party,
        make_up: MakeUp,
        end_waits: Callable[[], None] = lambda: None,
    ) -> None:
        self._whole_store, self._generation = store, generation
        self.store = _numbered(store, generation)
        self.party, self.make_up, self._end_waits = party, make_up, end_waits
        self.made = [0] * len(party.logs)  # made up for, beyond what this rank had started
        self._started: list[Started] = []
        self._waits_ended = False
        self._level = False  # with the rank that has come furthest, all having stopped
        self._said: str | None = None
        self._published: set[str] = set()

    def run(self, patience_s: float = PATIENCE_S) -> Outcome:
        """Until all have met, or nothing has moved for `patience_s`."""
        before: Any = None
        while True:
            states = self._states()
            unlogged = any(state is not None and state.unlogged for state in states)
            if unlogged and not self._waits_ended:
                self._waits_ended = True
                self._end_waits()
            self._publish_calls(states)
            if self.party.stopped:
                self._catch_up(states)
            if (states, self.made) != before:
                before, deadline = (states, self.made[:]), time.monotonic() + patience_s
            all_done = all(state is not None and state.done for state in states)
            if all_done or time.monotonic() > deadline or self.store.check(["verdict"]):
                met = self._verdict(all_done and not unlogged, patience_s)
                return Outcome(self._errors(states), met)
            time.sleep(_POLL_S * max(1, self.party.num_ranks / 16))

    def _errors(self, states: Sequence[_State | None]) -> dict[int, str]:
        told = {rank: state.error for rank, state in enumerate(states) if state is not None and state.error is not None}
        return first_error(self._whole_store, self._generation) | told

    def _states(self) -> list[_State | None]:
        """Of all ranks, this one's told first; those of the others once they are all there."""
        stopped = self.party.stopped  # before the counts: a rank that has stopped counts no further
        counts, error = [log.count for log in self.party.logs], self.party.error
        if error is not None:
            self._set(_RAISED, json.dumps([self.party.rank, error]))
        ended = self._level and all(started.has_ended() for started in self._started)
        own = _State(stopped, ended, counts, error, self.party.unlogged)
        text = json.dumps(own)
        if text != self._said:
            self.store.set(f"at/{self.party.rank}", text)
            self._said = text
        keys = [f"at/{rank}" for rank in range(self.party.num_ranks)]
        if not self.store.check(keys):
            return [own if rank == self.party.rank else None for rank in range(self.party.num_ranks)]
        others = [_State(*json.loads(said)) for said in self.store.multi_get(keys)]
        return [own if rank == self.party.rank else state for rank, state in enumerate(others)]

    def _publish_calls(self, states: Sequence[_State | None]) -> None:
        """What another rank lacks."""
        for number, log in enumerate(self.party.logs):
            known = [state.counts[number] for state in states if state is not None]
            for place, call in log.between(min(known), log.count):
                self._set(f"call/{self.party.rank}/{number}/{place}", call.to_json())

    def _catch_up(self, states: Sequence[_State | None]) -> None:
        """Make up for what others have started, in order, as far as it is known what that is."""
        if self._level:
            return
        logs = range(len(self.party.logs))
        for number in logs:
            while (calls := self._calls_at(number, states)) is not None:
                self._started.append(self.make_up(number, counterpart(self.party.rank, calls)))
                self.made[number] += 1
        known = [state for state in states if state is not None and state.stopped]
        if len(known) == len(states) and self.positions() == [max(state.counts[n] for state in known) for n in logs]:
            self._started += [self.make_up(number, None) for number in logs]
            self._level = True

    def _calls_at(self, number: int, states: Sequence[_State | None]) -> list[Call | None] | None:
        """Each rank's call at this rank's next place; None where nobody has one, or that is not known yet."""
        place = self.party.logs[number].count + self.made[number]
        known = [state for state in states if state is not None]
        has_one = [state.counts[number] > place for state in known]
        if len(known) < len(states) or not any(has_one):
            return None
        if not all(has or state.stopped for has, state in zip(has_one, known, strict=True)):
            return None
        keys = [f"call/{rank}/{number}/{place}" for rank, has in enumerate(has_one) if has]
        if not self.store.check(keys):
            return None
        said = iter(self.store.multi_get(keys))
        return [Call.from_json(next(said)) if has else None for has in has_one]

    def positions(self) -> list[int]:
        """How many collectives of each log this rank has started or made up for."""
        return [log.count + made for log, made in zip(self.party.logs, self.made, strict=True)]

    def _verdict(self, met: bool, patience_s: float) -> bool:
        """One for all ranks: that of whoever comes first."""
        if self.store.add("turn", 1) == 1:
            self.store.set("verdict", "met" if met else "given up")
        deadline = time.monotonic() + patience_s
        while not self.store.check(["verdict"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return self.store.get("verdict") == b"met"

    def _set(self, key: str, value: str) -> None:
        if key not in self._published:
            self.store.set(key, value)
            self._published.add(key)
