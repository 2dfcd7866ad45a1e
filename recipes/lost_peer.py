"""Noticing a lost or failed rank: what a failed collective says, and a heartbeat that needs no collective.

gloo fails at once when a peer's process ends. NCCL waits on the device, so that nothing in Python would raise: every
rank therefore also writes a beat into the launcher's store from a thread, and ends when another's beat stops. A rank
that fails leaves its error there, so that the others can say why they were left.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moe_ep.errors import MoEError, PeerError, Unavailable
from recipes.ranks import Launch, Ranks


def absent(err: Exception, launch: Launch, timeout_s: float, limit: str = "train.timeout_s") -> MoEError:
    """What to raise from the failure of a rank that tried to meet the others: who did not come, where that is known."""
    reason, within = str(err).splitlines()[0], f"within {timeout_s:g} s ({limit})"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in reason:
        return Unavailable(f"MASTER_PORT: another program listens on {address}; choose a free port")
    if joined := re.search(r"(\d+)/(\d+) clients joined", reason):
        who = f"only {joined[1]} of {joined[2]} ranks came {within}"
    elif waited := re.search(r"wait timeout .*keys: \S*/(\d+)", reason):  # gloo waits for one rank after the other
        who = f"rank {waited[1]} of {launch.world_size} did not come {within}"
    elif "connect" in reason:
        who = f"nobody answered at {address} (MASTER_ADDR, MASTER_PORT), where rank 0 should be, {within}"
    else:
        who = f"the {launch.world_size} ranks did not meet {within}: {reason}"
    return PeerError(f"{who}; look at the first error among all ranks, or start all {launch.world_size}")


def watch_peers(ranks: Ranks, timeout_s: float, exit_code: int) -> Heartbeat | None:
    """Start the heartbeat; one rank alone has nothing to watch.

    The process ends with `exit_code` and a message when another rank has been silent for `timeout_s`, or failed and the
    main thread still waits for it. The thread beats while its process lives, however long a step takes; it is ended
    before the interpreter is.
    """
    if ranks.group is None:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    beat = Heartbeat(PrefixStore("heartbeat", store), ranks, timeout_s, exit_code)
    beat.start()
    atexit.register(beat.stop)  # a thread inside the store's C++ code would end the interpreter with an abort
    return beat


class Heartbeat:
    """Beats and listens, four times in `timeout_s` (at most every 5 s); looks for failures every `LOOK_S`."""

    LOOK_S = 0.5
    TELL_S = 2.0  # how long a failing rank waits until all others have heard
    LEAVE_S = 10.0  # how long a rank that has heard of a failure may wait for it in some collective
    STOP_S = 10.0  # how long a rank that is through waits for an answer of the store

    def __init__(self, store: Store, ranks: Ranks, timeout_s: float, exit_code: int) -> None:
        self.store, self.ranks, self.timeout_s, self.exit_code = store, ranks, timeout_s, exit_code
        self.period_s = min(5.0, timeout_s / 4)
        self.heard = {peer: (b"", time.monotonic()) for peer in range(ranks.world_size) if peer != ranks.rank}
        self.failed = False
        self._said: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Beat and listen from a thread, once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait until it has left the store; idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self.STOP_S)

    def run(self) -> None:
        """Until it is stopped, or the store ends (then the launcher ends the job)."""
        count, heard_s = 0, None
        try:
            while not self._stopped.is_set():
                count += 1
                self.store.set(str(self.ranks.rank), str(count))
                lost = self.listen()
                if lost is not None:
                    self.end(f"rank {lost} gave no sign of life for {self.timeout_s:g} s (train.timeout_s)")
                next_beat = time.monotonic() + self.period_s
                while time.monotonic() < next_beat and not self._stopped.is_set():
                    heard_s = self.look(heard_s)
                    self._stopped.wait(min(self.LOOK_S, self.period_s))
        except (dist.DistError, RuntimeError):
            return

    def look(self, heard_s: float | None) -> float | None:
        """See whether another rank has said that it fails, and end if this one has waited long enough since."""
        if self.failed or (said := self.said()) is None:
            return None
        if heard_s is None:
            self.store.set(f"heard/{self.ranks.rank}", "1")
            return time.monotonic()
        if time.monotonic() - heard_s > self.LEAVE_S:
            self.end(said)
        return heard_s

    def said(self) -> str | None:
        """Which rank failed first, and its error."""
        if self._said is None and self.store.check(["failed"]):
            self._said = self.store.get("failed").decode()
        return self._said

    def tell(self, err: Exception) -> None:
        """Leave this rank's error for the others, and wait a moment for them: the store may go with this process."""
        self.failed = True
        own = str(err) if isinstance(err, PeerError) else f"rank {self.ranks.rank} failed: {type(err).__name__}: {err}"
        try:
            if self.said() is None:
                self.store.set("failed", own)
            self.store.set(f"heard/{self.ranks.rank}", "1")
            end = time.monotonic() + self.TELL_S
            while time.monotonic() < end and not self.store.check([f"heard/{peer}" for peer in self.heard]):
                time.sleep(0.02)
            if self.ranks.rank == 0:
                time.sleep(0.2)  # the store may be this process's: the others leave first
        except (dist.DistError, RuntimeError):
            return

    def explain(self, err: Exception) -> Exception:
        """What another rank said before it left, in place of an `err` that only says that it is gone."""
        try:
            said = self.said()
        except (dist.DistError, RuntimeError):
            said = self._said
        return err if said is None else PeerError(said).with_traceback(err.__traceback__)

    def listen(self) -> int | None:
        """A peer whose beat has not changed for `timeout_s`, or None."""
        now = time.monotonic()
        for peer, (value, since) in self.heard.items():
            fresh = self.store.get(str(peer)) if self.store.check([str(peer)]) else b""
            if fresh != value:
                self.heard[peer] = (fresh, now)
            elif now - since > self.timeout_s:
                return peer
        return None

    def end(self, why: str) -> None:
        """Say why and leave: the main thread may wait for ever."""
        print(f"rank {self.ranks.rank}: {why}; this rank stops", file=sys.stderr, flush=True)
        os._exit(self.exit_code)
