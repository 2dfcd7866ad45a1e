"""The placement heuristic of the `quota` planner: sixteen greedy rules, tried side by side for given thresholds.

A run aims at a threshold tau: a rank above it (a *source*) has a `need` to give rows away, one below it has `slack`.
Rows leave in pieces; a piece is one expert's rows, goes into one slot of another rank, and makes one replica. The
sixteen rules are all combinations of four choices, and which of them does best depends on the loads:

    order     ascending: the least loaded source first, or the most loaded one
    largest   at each step the expert that can give the most, or one expert after the other along the order
    fill      the widest slack that the piece fills whole (else the narrowest), or simply the widest slack
    careful   pass a piece on only where the source's need ends with it, or also where the expert's rows end

Passing on is what other public planners lack: where a piece would use up a rank's last slot and leave part of its slack
unused, it goes to a later source instead, which must then give away that much more of its own experts. With one slot a
rank the mean load is mostly out of reach without it.

One run is a sequence of at most R*S pieces and E refusals, each step two reductions (over experts, over ranks), so a
thread block runs it as one warp: `need`, `slack`, `free` and `avail` in registers, `rest` and `hosts` in shared memory.
Here the runs are the leading dimension C of every tensor and advance in lockstep. Ties are broken by position in the
order, then by rank, never by a floating-point value, so the result is the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUM_RULES = 16
_BIG = 1 << 32  # above every count


class Runs(NamedTuple):
    """What the runs came to: `moved` int64 [C, E, R] rows given away, `peak` int64 [C] largest load, `pieces` [C]."""

    moved: Tensor
    peak: Tensor
    pieces: Tensor


@dataclass(slots=True)
class _State:
    """C runs under way; int64 unless said otherwise."""

    need: Tensor  # [C, R] rows that a source still has to give away
    slack: Tensor  # [C, R] rows that a rank can take
    avail: Tensor  # [C, R] own experts' rows still at home
    free: Tensor  # [C, R] unused slots
    left: Tensor  # [C, R] unused slots and replicas placed before that have no rows yet
    placed: Tensor  # bool [E, R]
    rest: Tensor  # [C, E] rows of each expert still at home
    open: Tensor  # bool [C, E], no rank refused the expert yet
    hosts: Tensor  # bool [C, E, R], ranks with rows of the expert, and its home
    moved: Tensor  # [C, E, R]


class _Rules(NamedTuple):
    """The four choices of each run, bool [C], and the orders of experts and ranks that follow, [C, E] and [C, R]."""

    largest: Tensor
    fill: Tensor
    careful: Tensor
    expert_place: Tensor
    rank_place: Tensor


def run(load_E: Tensor, free_R: Tensor, placed: Tensor, min_quota: int, thresholds: list[int]) -> Runs:
    """Try every rule with every threshold.

    Args:
        load_E: int64 [E], rows of each expert over all sources; rank r is home to experts r*E/R to (r+1)*E/R.
        free_R: int64 [R], unused slots of each rank.
        placed: bool [E, R], replicas that are in other slots already, and take no further one.
        min_quota: fewest rows of a replica, at least 1.
        thresholds: values of tau.

    Returns:
        C = 16 * len(thresholds) runs, the rules of the first threshold first.
    """
    num_ranks, num_runs = len(free_R), NUM_RULES * len(thresholds)
    num_local = len(load_E) // num_ranks
    home_E = torch.arange(len(load_E)) // num_local
    load_R = load_E.view(num_ranks, num_local).sum(1)
    tau_C = torch.tensor(thresholds).repeat_interleave(NUM_RULES)[:, None]
    state = _State(
        need=(load_R - tau_C).clamp_min(0),
        slack=(tau_C - load_R).clamp_min(0),
        avail=load_R.repeat(num_runs, 1),
        free=free_R.repeat(num_runs, 1),
        left=(free_R + placed.sum(0)).repeat(num_runs, 1),
        placed=placed,
        rest=load_E.repeat(num_runs, 1),
        open=torch.ones((num_runs, len(load_E)), dtype=torch.bool),
        hosts=(home_E[:, None] == torch.arange(num_ranks)).repeat(num_runs, 1, 1),
        moved=torch.zeros((num_runs, len(load_E), num_ranks), dtype=torch.int64),
    )
    rules = _rules(load_E, load_R, home_E, num_runs)
    while _step(state, rules, home_E, min_quota):
        pass
    arrived, left = state.moved.sum(1), state.moved.sum(2).view(num_runs, num_ranks, num_local).sum(2)
    return Runs(state.moved, (load_R + arrived - left).amax(1), (state.moved > 0).sum((1, 2)))


def _rules(load_E: Tensor, load_R: Tensor, home_E: Tensor, num_runs: int) -> _Rules:
    """Rule c of each threshold makes the choices of the bits of c."""
    bits = torch.arange(num_runs) % NUM_RULES
    places = []
    for sign in (-1, 1):  # the most loaded source first, the least loaded one first; equal ones by rank
        rank_place = torch.argsort(torch.argsort(sign * load_R, stable=True))
        by_load = torch.argsort(-load_E, stable=True)  # within a source the largest expert first
        by_source = by_load[torch.argsort(rank_place[home_E[by_load]], stable=True)]
        places.append((torch.argsort(by_source), rank_place))
    ascending = bits & 1
    expert_place, rank_place = (torch.stack(both)[ascending] for both in zip(*places, strict=True))
    return _Rules((bits & 2) > 0, (bits & 4) > 0, (bits & 8) > 0, expert_place, rank_place)


def _step(state: _State, rules: _Rules, home_E: Tensor, min_quota: int) -> bool:
    """Each run places one piece, or closes one expert that no rank can take; False where none can do either."""
    expert, want, alive = _choose_expert(state, rules, home_E, min_quota)
    if not bool(alive.any()):
        return False
    runs, home = torch.arange(len(expert)), home_E[expert]
    usable = ((state.free > 0) | state.placed[expert]) & ~state.hosts[runs, expert]
    target, found = _choose_target(state, rules, usable, want, min_quota)
    room, need = state.slack[runs, target], state.need[runs, home]
    wasteful = ~found | ((room > want) & (state.left[runs, target] == 1))
    wasteful &= ~rules.careful | (want >= need)
    relay, relayed = _choose_relay(state, rules, usable, home, want)
    relayed &= wasteful & alive
    direct = found & ~relayed & alive
    moved = direct | relayed
    dest = torch.where(relayed, relay, target)
    rows = torch.where(relayed, want, torch.minimum(want, room)) * moved
    state.open[runs, expert] &= moved | ~alive
    state.need[runs, home] = (need - rows).clamp_min(0)
    state.avail[runs, home] -= rows
    state.rest[runs, expert] -= rows
    state.need[runs, dest] += rows * relayed
    state.slack[runs, dest] -= rows * direct
    state.left[runs, dest] -= moved.long()
    state.free[runs, dest] -= (moved & ~state.placed[expert, dest]).long()
    state.hosts[runs, expert, dest] |= moved
    state.moved[runs, expert, dest] += rows
    return True


def _choose_expert(state: _State, rules: _Rules, home_E: Tensor, min_quota: int) -> tuple[Tensor, Tensor, Tensor]:
    """The expert that gives the next piece, at most how many rows, and whether there is one; [C] each."""
    need_E = state.need[:, home_E]
    want = torch.minimum(need_E.clamp_min(min_quota), state.rest)
    key = want * rules.largest[:, None] * len(home_E) + (len(home_E) - 1 - rules.expert_place)
    key = key.masked_fill(~state.open | (need_E == 0) | (want < min_quota), -1)
    best, expert = key.max(1)  # keys of one run differ, so the place of the maximum is no question of the device
    return expert, want.gather(1, expert[:, None])[:, 0], best >= 0


def _choose_target(state: _State, rules: _Rules, usable: Tensor, want: Tensor, min_quota: int) -> tuple[Tensor, Tensor]:
    """The rank with slack that takes the piece, and whether there is one; [C] each."""
    num_ranks = usable.shape[1]
    filled = torch.where(state.slack <= want[:, None], _BIG + state.slack, _BIG - state.slack)
    key = torch.where(rules.fill[:, None], filled, state.slack) * num_ranks + torch.arange(num_ranks - 1, -1, -1)
    best, target = key.masked_fill(~usable | (state.slack < min_quota), -1).max(1)
    return target, best >= 0


def _choose_relay(state: _State, rules: _Rules, usable: Tensor, home: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """The next source in the order that can take the piece and give away as much more of its own; [C] each."""
    place, num_ranks = rules.rank_place, usable.shape[1]
    later = place > place.gather(1, home[:, None])
    able = usable & later & (state.need > 0) & (state.avail >= state.need + want[:, None])
    best, relay = (num_ranks - place).masked_fill(~able, -1).max(1)
    return relay, best >= 0
