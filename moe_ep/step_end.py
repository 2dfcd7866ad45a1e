"""A step that ends on all ranks alike: each of them leaves it in order, or each of them raises.

    with raise_on_all_ranks(group):
        loss(model(x)).backward()

An exception inside is handed to the group's alarm (`moe_ep.alarm`). Without one the ranks meet at the end and compare
what they have launched (`moe_ep.meeting`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from .alarm import Alarm
from .alarm_registry import find_alarm
from .calls import Call
from .errors import PeerError, lost_peer
from .meeting import WAY_OUT, all_equal
from .order import order_of


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
            if (order := order_of(group)) is not None:  # a rank that compares its next launch starts nothing meanwhile
                order.enter("end of a step", "of the step", ())
            meet(alarm)
    except BaseException as err:  # who catches a KeyboardInterrupt or a SystemExit goes on, too
        if (alarm := find_alarm(group)) is not None:
            alarm.explain(err)
            alarm.fail(err, f"a step, behind {alarm.last or 'no communication yet'}")
        raise


def meet(alarm: Alarm) -> None:
    """Wait for all ranks to come here, and compare what they have launched. A host sync on a GPU.

    Raises:
        PeerError: as `Alarm.check`; a rank was lost, waits for what another has not launched, or launched something
            else.
    """
    watched = alarm.watched
    if watched.meets_in == 0 and watched.noted == 0 and not alarm.party.unlogged:
        return  # nothing has travelled on any rank
    device = torch.device("cpu") if watched.meets_in else watched.device
    alarm.check()
    counts, mine, meeting = watched.counts(), alarm.launches.digest(device), alarm.meeting
    call = Call("all_gather", device.type, 1, [len(mine)], [len(mine)])
    meeting.number, meeting.waiting = meeting.number + 1, True
    started = watched.start_noted(watched.meets_in, call, device, mine)
    try:
        _wait_for_all(alarm, meeting.ask(counts, mine, started.has_ended))
        gathered, _ = started.wait_on_host()
    except PeerError:
        raise
    except RuntimeError as err:
        alarm.explain(err)
        raise lost_peer("meeting of all ranks", err) from err
    finally:
        meeting.waiting = False
    alarm.check()
    if not all_equal(gathered):
        _differ(alarm)


def _wait_for_all(alarm: Alarm, look: Callable[[], str | None]) -> None:
    said = ""

    def is_over() -> bool:
        nonlocal said
        answer = look()
        said = answer or ""
        return answer is None or bool(answer)

    alarm.watch_for(is_over)
    if said:
        alarm.stop(f"the end of a step, behind {alarm.launches}: {said}. {WAY_OUT}")
        raise alarm.peer_error()


def _differ(alarm: Alarm) -> NoReturn:
    """All ranks are here; all have to stop, and each says what it has sent."""
    alarm.stop(f"the end of a step, behind {alarm.launches}")
    first: dict[str, int] = {}
    for rank, text in alarm.errors.items():
        first.setdefault(text, rank)
    each = "; ".join(f"rank {rank} is at {text}" for text, rank in first.items())
    raise PeerError(alarm.given_up or f"the ranks have not sent the same, or in another order: {each}. {WAY_OUT}")
