"""An exception on one rank becomes an exception on every rank.

A rank whose experts (or whatever runs between two communications) raise would leave the others waiting in the next one.
So each process keeps, for each group, an `Alarm`: a log of the collectives that it has started, and a thread that looks
into the group's store a few times a second. The failing rank leaves its error there; what happens then is in
`moe_ep.settlement`. Layers do this by themselves in forward. Around backward and around code of one's own:

    with raise_on_all_ranks(group):
        loss(model(x)).backward()

The failing rank raises its own error, the others a PeerError with its rank (in the job), place, type and text.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .calls import Call, CallLog
from .errors import PeerError, lost_peer
from .meeting import WAY_OUT, Launches, Meeting, all_equal
from .peers import is_everywhere, is_lost_peer, mark_everywhere
from .settlement import PATIENCE_S, Outcome, Party, Settlement, Started, first_error

_SPIN_S, _NAP_S = 0.05, 0.001  # how long a host looks for a GPU without a pause, as CUDA's own waits do; how often else
_LONGEST_TEXT = 2000  # characters of an error that travel
PERIOD_S = 0.2  # how often a rank looks whether another has failed
# starts a call on a group; see `settlement.MakeUp`
StartCall = Callable[..., Started]  # (group, call or None, device[, what to send])

_alarms: dict[str, Alarm] = {}


class Alarm:
    """The alarm of one process group on this rank.

    Args:
        group: of two ranks or more; on every rank of it an alarm is made.
        start_call: how a collective is started.

    Attributes:
        told: another rank has failed; this one stops at its next communication.
        given_up: why the group serves no more, None as long as it does.
        last, newest: the last communication that this rank has waited for, and has launched, for messages.
        generation: how often a rank has failed and all have stopped; the same on all ranks between two failures.
        launches: what this rank has sent in this step.
    """

    def __init__(self, group: dist.ProcessGroup, start_call: StartCall) -> None:
        self.told = False
        self.given_up: str | None = None
        self.last = self.newest = ""
        self.generation = 0
        self.launches = Launches()
        self.party = Party(group.rank(), group.size())
        self._job_ranks = dist.get_process_group_ranks(group)
        self.noted = 0
        self._groups, self._numbers = [weakref.ref(group)], {group.group_name: 0}
        self._waiters: list[weakref.WeakMethod[Callable[[int], None]]] = []
        self._device = torch.device("cpu")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._start_call = start_call
        store = PrefixStore("moe_ep.alarm", _own_connection(group.get_group_store()))
        # the same store may have served an earlier group of the same name
        self._store = PrefixStore(str(store.add(f"joined/{self.party.rank}", 1)), store)
        self._meeting, self._met_in = Meeting(self._numbered(), self.party.rank, self.party.num_ranks), group.group_name
        self._lock = threading.Lock()
        self._wake, self._settled, self._closed = threading.Event(), threading.Event(), False
        self._outcome = Outcome({}, True)
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"alarm of group {group.group_name}")
        self._thread.start()

    # what the rank's own threads call

    def include(self, group: dist.ProcessGroup) -> None:
        """Watch over another process group of the same ranks, too; called on every rank, before anything runs on it."""
        if self.watches(group):
            return
        self._groups.append(weakref.ref(group))
        self._numbers[group.group_name] = len(self.party.logs)
        self.party.logs.append(CallLog())
        _alarms[group.group_name] = self

    def meet_in(self, group: dist.ProcessGroup) -> None:
        """Meet in this process group, which serves nothing else; as `include`."""
        self.include(group)
        self._met_in = group.group_name

    def watches(self, group: dist.ProcessGroup) -> bool:
        """Whether this is the alarm of that very group."""
        number = self._numbers.get(group.group_name)
        return number is not None and self._groups[number]() is group

    def end_waits_with(self, stop: Callable[[int], None]) -> None:
        """Call this method (kept weakly) once the group is to be given up: it ends waits of all ranks on their GPUs.

        It is called on a thread of its own, by every rank that can, with a number above 0 that names the rank.
        """
        self._waiters.append(weakref.WeakMethod(stop))

    def note(self, group: dist.ProcessGroup, call: Call, device: torch.device) -> None:
        """A collective is about to start."""
        self._device = device
        self.noted += 1
        self.party.logs[self._numbers[group.group_name]].add(call)

    def launched(self, what: str, device: torch.device, *, since: int) -> None:
        """A communication was launched: it was noted `since` there were so many, or nobody can make up for it."""
        self.newest = what
        if self.noted == since:
            self.party.unlogged, self._device = True, device

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

    def meet(self) -> None:
        """Wait for all ranks to come here, and compare what they have launched. A host sync on a GPU.

        Raises:
            PeerError: as `check`; a rank was lost, waits for what another has not launched, or launched something else.
        """
        number = self._numbers[self._met_in]
        if number == 0 and self.noted == 0 and not self.party.unlogged:
            return  # nothing has travelled on any rank
        group, device = self._groups[number](), torch.device("cpu") if number else self._device
        assert group is not None, "the process group is gone"
        self.check()
        counts = [log.count for log in self.party.logs]
        mine = self.launches.digest(device)
        call = Call("all_gather", device.type, 1, [len(mine)], [len(mine)])
        meeting = self._meeting
        meeting.number, meeting.waiting = meeting.number + 1, True
        self.note(group, call, device)
        started = self._start_call(group, call, device, mine)
        try:
            self._wait_for_all(meeting.ask(counts, mine, started.has_ended))
            gathered, _ = started.wait_on_host()
        except PeerError:
            raise
        except RuntimeError as err:
            self.explain(err)
            raise lost_peer("meeting of all ranks", err) from err
        finally:
            meeting.waiting = False
        self.check()
        if not all_equal(gathered):
            self._differ()

    def _wait_for_all(self, look: Callable[[], str | None]) -> None:
        said = ""

        def is_over() -> bool:
            nonlocal said
            answer = look()
            said = answer or ""
            return answer is None or bool(answer)

        self.watch_for(is_over)
        if said:
            self._stop(f"the end of a step, behind {self.launches}: {said}. {WAY_OUT}")
            raise PeerError(self.given_up or self._sentence())

    def _differ(self) -> NoReturn:
        """All ranks are here; all have to stop, and each says what it has sent."""
        self._stop(f"the end of a step, behind {self.launches}")
        first = {text: rank for rank, text in sorted(self._outcome.errors.items(), reverse=True)}
        each = "; ".join(f"rank {self._job_ranks[rank]} is at {text}" for text, rank in reversed(first.items()))
        raise PeerError(self.given_up or f"the ranks have not sent the same, or in another order: {each}. {WAY_OUT}")

    def watch_for(self, has_ended: Callable[[], bool]) -> None:
        """Wait until a communication has ended, or the group is given up: then it may never end.

        Raises:
            PeerError: the group is given up.
        """
        spin_until = time.perf_counter() + (_SPIN_S if self._device.type == "cuda" else 0)
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
        self._stop(text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ...")
        if self.given_up is not None:
            err.add_note(self.given_up)

    def explain(self, err: BaseException) -> None:
        """Raise what another rank had to say before it left, where `err` only says that it is gone.

        Raises:
            PeerError: as `check`.
        """
        if (self.told or self.given_up is not None) and is_lost_peer(err):
            raise PeerError(self.given_up or self._sentence()) from err

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    # internals

    def _raise(self) -> NoReturn:
        self._stop(None)
        raise PeerError(self.given_up or self._sentence())

    def _stop(self, error: str | None) -> None:
        with self._lock:
            if self.given_up is not None or self._closed:
                return
            self._settled.clear()
            self.party.error, self.party.stopped = error, True
        self._wake.set()
        self._settled.wait()

    def _sentence(self) -> str:
        errors = sorted(self._outcome.errors.items())
        failed = [f"rank {self._job_ranks[rank]} failed in {text}" for rank, text in errors]
        return "; ".join(failed[:2])

    def _run(self) -> None:
        try:
            while not self._closed and self.given_up is None and self._groups[0]() is not None:
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
        counts = [log.count for log in self.party.logs]
        rank = self._job_ranks[self.party.rank]
        self._meeting.answer(counts, f"rank {rank} is not there and waits for {self.newest}")

    def _numbered(self) -> PrefixStore:
        return PrefixStore(f"meeting/{self.generation}", self._store)

    def _settle(self, generation: int) -> None:
        settlement = Settlement(self._store, generation, self.party, self._make_up, self._end_waits)
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
            self._meeting = Meeting(self._numbered(), self.party.rank, self.party.num_ranks)
            self._settled.set()

    def _end_waits(self) -> None:
        for waiter in self._waiters:
            if (stop := waiter()) is not None:
                with contextlib.suppress(RuntimeError):  # this rank's GPU may be what failed; every rank tries
                    stop(self.party.rank + 1)

    def _make_up(self, log: int, call: Call | None) -> Started:
        group = self._groups[log]()
        if group is None:
            raise RuntimeError("the process group is gone")
        device = self._device
        if call is not None and call.device != device.type:  # this rank has noted nothing yet
            device = torch.device(call.device)
        return self._start_call(group, call, device)


def _own_connection(store: Any) -> Any:
    """The store over a connection that no long wait of another user blocks; kinds without connections have no other."""
    try:
        return store.clone()
    except RuntimeError:
        return store


def alarm_of(group: dist.ProcessGroup, start_call: StartCall) -> Alarm:
    """The alarm of a group, made at first use; `close_alarm` ends it."""
    alarm = _alarms.get(group.group_name)
    if alarm is None or not alarm.watches(group):
        close_alarm(group)
        alarm = _alarms[group.group_name] = Alarm(group, start_call)
    return alarm


def find_alarm(group: dist.ProcessGroup | None) -> Alarm | None:
    """The alarm of a group, None where there is none."""
    alarm = None if group is None else _alarms.get(group.group_name)
    return alarm if alarm is not None and group is not None and alarm.watches(group) else None


def launch_unlogged(group: dist.ProcessGroup) -> None:
    """Communication of another kind than `calls` knows is about to start.

    Raises:
        PeerError: another rank has failed.
    """
    if (alarm := find_alarm(group)) is not None:
        alarm.check()
        alarm.party.unlogged = True


def close_alarm(group: dist.ProcessGroup | None) -> None:
    """End the alarm of a group; call it before the group is destroyed."""
    alarm = None if group is None else _alarms.get(group.group_name)
    if alarm is not None:
        alarm.close()
        for name in [name for name, one in _alarms.items() if one is alarm]:
            del _alarms[name]


@atexit.register
def _close_all() -> None:
    # a thread inside the store's C++ code would end the interpreter with an abort
    for alarm in _alarms.values():
        alarm.close()


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """An exception inside is raised by every rank of the group: by this one as it is, by the others as a PeerError.

    Put it around forward and backward of a step. Either every rank leaves it in order, having waited for the others at
    its end, or every rank raises, having stopped; then the next step may begin. What lies outside of moe_ep may not be
    so forgiving: FSDP2 and DistributedDataParallel have no way out of a half-done backward.

    Args:
        group: the expert-parallel group of the model's MoE layers; None: this rank is alone.

    Raises:
        PeerError: another rank failed; or the ranks have not sent the same since the beginning, in the same order.
    """
    if (alarm := find_alarm(group)) is not None:
        alarm.launches.begin()
    try:
        yield
        if (alarm := find_alarm(group)) is not None:
            alarm.meet()
    except BaseException as err:  # who catches a KeyboardInterrupt or a SystemExit goes on, too
        if (alarm := find_alarm(group)) is not None:
            alarm.explain(err)
            alarm.fail(err, f"a step, behind {alarm.last or 'no communication yet'}")
        raise
