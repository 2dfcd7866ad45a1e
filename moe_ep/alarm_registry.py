"""Which alarm watches over a process group; each process has one for all groups of the same ranks."""

from __future__ import annotations

import atexit

import torch.distributed as dist

from .alarm import Alarm
from .watched_groups import StartCall

_alarms: dict[str, Alarm] = {}


def alarm_of(group: dist.ProcessGroup, start_call: StartCall) -> Alarm:
    """The alarm of a group, made at first use; `close_alarm` ends it."""
    alarm = _alarms.get(group.group_name)
    if alarm is None or group not in alarm.watched:
        close_alarm(group)
        alarm = _alarms[group.group_name] = Alarm(group, start_call)
    return alarm


def find_alarm(group: dist.ProcessGroup | None) -> Alarm | None:
    """The alarm of a group, None where there is none."""
    alarm = None if group is None else _alarms.get(group.group_name)
    return alarm if alarm is not None and group is not None and group in alarm.watched else None


def include(alarm: Alarm, group: dist.ProcessGroup) -> None:
    """Watch over another process group of the same ranks, too; called on every rank, before anything runs on it."""
    alarm.watched.add(group)
    _alarms[group.group_name] = alarm


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
