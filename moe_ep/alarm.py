"""An exception on one rank becomes an exception on every rank.

A rank whose experts (or whatever runs between two communications) raise would leave the others waiting in the next one.
So each process keeps, for each group, an `Alarm`: a log of the collectives that it has started, and a thread that looks
into the group's store a few times a second. The failing rank leaves its error there; what happens then is in
`moe_ep.settlement`. Layers do this by themselves in forward; for backward and code of one's own see `moe_ep.step_end`.
The failing rank raises its own error, the others a PeerError with its rank (in the job), place, type and text.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .errors import PeerError
from .meeting import Launches, Meeting
from .peers import is_everywhere, is_lost_peer, mark_everywhere, mark_heard
from .settlement import PATIENCE_S, Outcome, Party, Settlement, first_error
from .watched_groups import StartCall, WatchedGroups

_SPIN_S, _NAP_S = 0.05, 0.001  # how long a host looks for a GPU without a pause, as CUDA's own waits do; how often else
_LONGEST_TEXT = 2000  # characters of an error that travel
PERIOD_S = 0.2  # how often a rank looks whether another has failed


class Alarm:
    """The alarm of one process group on this rank.

    Args:
        group: of two ranks or more; on every rank of it an alarm is made.
        start_call: how a collective is started.

    Attributes:
        watched: the process groups of these ranks, and what this rank has started on each.
        told: another rank has failed; this one stops at its next communication.
        given_up: why the group serves no more, None as long as it does.
        last, newest: the last communication that this rank has waited for, and has launched, for messages.
        generation: how often a rank has failed and all have stopped; the same on all ranks between two failures.
        launches: what this rank has sent in this step.
        meeting: of the ranks, at the end of a step.
    """

    def __init__(self, group: dist.ProcessGroup, start_call: StartCall) -> None:
        self.told = False
        self.given_up: str | None = None
        self.last = self.newest = ""
        self.generation = 0
        self.launches = Launches()
        self.watched = WatchedGroups(group, start_call)
        self.party = Party(group.rank(), group.size(), self.watched.logs)
        self._job_ranks = dist.get_process_group_ranks(group)
        self._waiters: list[weakref.WeakMethod[Callable[[int], None]]] = []
        store = PrefixStore("moe_ep.alarm", _own_connection(group.get_group_store()))
        # the same store may have served an earlier group of the same name
        self._store = PrefixStore(str(store.add(f"joined/{self.party.rank}", 1)), store)
        self.meeting = self._new_meeting()
        self._lock = threading.Lock()
        self._wake, self._settled, self._closed = threading.Event(), threading.Event(), False
        self._outcome = Outcome({}, True)
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"alarm of group {group.group_name}")
        self._thread.start()

    def end_waits_with(self, stop: Callable[[int], None]) -> None:
        """Call this method (kept weakly) once the group is to be given up: it ends waits of all ranks on their GPUs.

        It is called on a thread of its own, by every rank that can, with a number above 0 that names the rank.
        """
        self._waiters.append(weakref.WeakMethod(stop))

    def launched(self, what: str, device: torch.device, *, since: int) -> None:
        """A communication was launched: it was noted `since` there were so many, or nobody can make up for it."""
        self.newest = what
        if self.watched.noted == since:
            self.party.unlogged, self.watched.device = True, device

    def check(self) -> None:
        """Raise if another rank has failed, as soon as all ranks have stopped.

        Raises:
            PeerError: names that rank, where it was, and its error.
        """
        if self.told or self.given_up is not None:
            self._raise()

    def hear(self, patience_s: float = PATIENCE_S) -> None:
        """A wait on the device has ended without its peer: raise what another rank has to say, if it says so soon.

        Raises:
            PeerError: as `check`.
        """
        deadline = time.monotonic() + patience_s
        while not self.told and self.given_up is None and time.monotonic() < deadline:
            time.sleep(_NAP_S)
        self.check()

    def watch_for(self, has_ended: Callable[[], bool]) -> None:
        """Wait until a communication has ended, or the group is given up: then it may never end.

        Raises:
            PeerError: the group is given up.
        """
        spin_until = time.perf_counter() + (_SPIN_S if self.watched.device.type == "cuda" else 0)
        while not has_ended():
            if self.given_up is not None:
                self._raise()
            time.sleep(0 if time.perf_counter() < spin_until else _NAP_S)

    def fail(self, err: BaseException, where: str) -> None:
        """Make the other ranks raise because of `err`; returns when all have stopped or the group was given up.

        Nothing happens for an error that all ranks raise anyway, nor for one that was told before.
        """
        if is_everywhere(err):
            return
        self.stop_all(err, where)

    def stop_all(self, err: BaseException, where: str) -> None:
        """As `fail`, also where the other ranks raise `err` of themselves and only have to stop at one call."""
        mark_everywhere(err)
        text = f"{where}: {type(err).__name__}: {err}".removesuffix(": ")
        self.stop(text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ...")
        if self.given_up is not None:
            err.add_note(self.given_up)

    def stop(self, error: str | None) -> None:
        """Start nothing more; returns when all have stopped or the group was given up. `error`: what this rank says."""
        with self._lock:
            if self.given_up is not None or self._closed:
                return
            self._settled.clear()
            self.party.error, self.party.stopped = error, True
        self._wake.set()
        self._settled.wait()

    @property
    def errors(self) -> dict[int, str]:
        """What ranks (of the job) had to say when all stopped, in the group's order."""
        return {self._job_ranks[rank]: text for rank, text in sorted(self._outcome.errors.items())}

    def peer_error(self) -> PeerError:
        """What another rank had to say, for this one to raise."""
        err = PeerError(self.given_up or self._sentence())
        mark_heard(err)
        return err

    def explain(self, err: BaseException) -> None:
        """Raise what another rank had to say before it left, where `err` only says that it is gone.

        Raises:
            PeerError: as `check`.
        """
        if (self.told or self.given_up is not None) and is_lost_peer(err):
            raise self.peer_error() from err

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _raise(self) -> NoReturn:
        self.stop(None)
        raise self.peer_error()

    def _sentence(self) -> str:
        failed = [f"rank {rank} failed in {text}" for rank, text in self.errors.items()]
        return "; ".join(failed[:2])

    # what runs on the alarm's own thread

    def _run(self) -> None:
        try:
            while not self._closed and self.given_up is None and not self.watched.is_gone():
                self._wake.wait(PERIOD_S)
                self._wake.clear()
                if self.party.error is not None or first_error(self._store, self.generation):
                    self._settle(self.generation)
                else:
                    self._answer()
        except Exception as err:  # whatever it is, the rank's own thread must not wait for this one
            with self._lock:
                self._closed, awaited = True, self.told or self.party.stopped
            if awaited:  # else the job is at its end, and the store went first
                self._end(Outcome(self._outcome.errors, False), f"its end was not seen ({type(err).__name__}: {err})")

    def _answer(self) -> None:
        rank = self._job_ranks[self.party.rank]
        self.meeting.answer(self.watched.counts(), f"rank {rank} is not there and waits for {self.newest}")

    def _new_meeting(self) -> Meeting:
        store = PrefixStore(f"meeting/{self.generation}", self._store)
        return Meeting(store, self.party.rank, self.party.num_ranks)

    def _settle(self, generation: int) -> None:
        settlement = Settlement(self._store, generation, self.party, self.watched.make_up, self._end_waits)
        self._outcome = Outcome(first_error(self._store, generation), False)
        self.told = True
        outcome = settlement.run()
        if outcome.met:
            for log, place in zip(self.party.logs, settlement.positions(), strict=True):
                log.skip_to(place)
        self._end(outcome, "not all ranks came to a stop, or nobody can make up for what they had started")

    def _end(self, outcome: Outcome, why: str) -> None:
        with self._lock:
            self._outcome = outcome
            if not outcome.met:
                self.given_up = f"{self._sentence()}. The process group serves no more, {why}; start the ranks again"
            self.party.error, self.party.stopped, self.told = None, False, False
            self.generation += 1
            self.launches.begin()
            self.meeting = self._new_meeting()
            self._settled.set()

    def _end_waits(self) -> None:
        for waiter in self._waiters:
            if (stop := waiter()) is not None:
                with contextlib.suppress(RuntimeError):  # this rank's GPU may be what failed; every rank tries
                    stop(self.party.rank + 1)


def _own_connection(store: Any) -> Any:
    """The store over a connection that no long wait of another user blocks; kinds without connections have no other."""
    try:
        return store.clone()
    except RuntimeError:
        return store
