"""Balancing policies run over the micro-batches of a routing trace: tokens rerouted, and counted where they land."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ep.load import expert_load, imbalance
from moe_ep.replica.checks import check_slots
from moe_ep.replica.planners import lower_bound
from moe_ep.schema import require
from recipes.routing_trace import Step, TraceHeader
from tools.replica_policies import Placement, Policy, Setting, build_policy, destinations


@dataclass(slots=True)
class Series:
    """One policy on one layer, micro-batch after micro-batch."""

    peak: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # experts, by the rank that sends most
    remote: list[float] = field(default_factory=list)
    sends: list[float] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """One trace: series by (layer, policy), the bound of each layer's micro-batches."""

    name: str
    header: TraceHeader
    series: dict[tuple[int, str], Series] = field(default_factory=dict)
    bounds: dict[int, list[float]] = field(default_factory=dict)


def measure(name: str, steps: Iterable[Step], chosen: argparse.Namespace, names: Sequence[str]) -> Report:
    """Run every policy over a trace.

    Raises:
        MoEError: see `setting_of`.
    """
    report: Report | None = None
    policies: dict[tuple[int, int, str], Policy] = {}
    past: dict[tuple[int, int], list[Tensor]] = {}
    for step in list(steps)[:: chosen.every]:
        header = step.header
        report = report or Report(name, header)
        setting = setting_of(header, chosen)
        for layer in range(header.layers):
            seen = past.setdefault((header.replica, layer), [])
            for micros in interleaved(header.micro_batches, chosen.together):
                ids = [[rank[layer, micro].long() for rank in step.ids] for micro in micros]
                loads = [torch.stack([expert_load(rank, header.num_experts) for rank in each]) for each in ids]
                for number, load in enumerate(loads):
                    note_bound(report, layer, load, chosen.slots)
                    for policy_name in fitting(names, setting):
                        key = (header.replica, layer, policy_name)
                        if key not in policies:
                            policies[key] = build_policy(policy_name, setting, chosen.window)
                        series = report.series.setdefault((layer, policy_name), Series())
                        placement = decide(policies[key], loads, number, seen, series)
                        count(placement, ids[number], setting, series)
                    seen.append(load.sum(0))
    assert report is not None, "a trace without steps"
    return report


def setting_of(header: TraceHeader, chosen: argparse.Namespace) -> Setting:
    """The setting of a step.

    Raises:
        RecipeError: R does not divide E. PlanError: impossible slots or smallest quota.
    """
    ranks, experts = header.ranks, header.num_experts
    require(experts % ranks == 0, f"{experts} experts cannot be divided among {ranks} ranks; this is no moe_ep trace")
    check_slots("quota", chosen.slots, chosen.min_quota, experts // ranks)
    sizes = {"num_ranks": ranks, "num_experts": experts, "slots": chosen.slots}
    return Setting(**sizes, min_quota=chosen.min_quota, tolerance=chosen.tolerance)


def fitting(names: Sequence[str], setting: Setting) -> list[str]:
    """The policies that these slots allow: fixed_rows needs L of them."""
    return [name for name in names if name != "fixed_rows" or setting.slots >= setting.num_local]


def note_bound(report: Report, layer: int, load: Tensor, slots: int) -> None:
    """The slot bound of one micro-batch, as max/mean."""
    total_E, ranks = load.sum(0), load.shape[0]
    mean = float(total_E.sum()) / ranks
    bound = lower_bound(total_E, ranks, slots, int(total_E.sum()) + 1)
    report.bounds.setdefault(layer, []).append(bound / mean if mean else 1.0)


def interleaved(micro_batches: int, together: int) -> list[range]:
    """The micro-batches of a step, so many at a time."""
    return [range(first, min(first + together, micro_batches)) for first in range(0, micro_batches, together)]


def decide(policy: Policy, loads: Sequence[Tensor], number: int, past: Sequence[Tensor], series: Series) -> Placement:
    """The placement of one micro-batch of those that interleave, timed."""
    started = time.perf_counter()
    placement = policy.place(loads, number, past)
    series.plan_ms.append(1e3 * (time.perf_counter() - started))
    return placement


def count(placement: Placement, ids: Sequence[Tensor], setting: Setting, series: Series) -> None:
    """Send every rank's tokens as decided, and count."""
    rows_R = torch.zeros(setting.num_ranks, dtype=torch.int64)
    stayed = tokens = sends = 0
    for rank, ids_TK in enumerate(ids):
        dest = destinations(placement, ids_TK, setting, rank)
        rows_R += expert_load(dest, setting.num_ranks)
        stayed += int((dest == rank).sum())
        reached = torch.zeros((len(dest), setting.num_ranks + 1), dtype=torch.bool)
        reached.scatter_(1, dest.masked_fill(dest < 0, setting.num_ranks), True)
        reached[:, [rank, setting.num_ranks]] = False
        sends += int(reached.sum())
        tokens += int((ids_TK >= 0).any(1).sum())
    rows = int(rows_R.sum())
    series.peak.append(float(imbalance(rows_R)))
    series.replicas.append(placement.replicas)
    series.sent.append(max(placement.sent))
    series.remote.append(1 - stayed / max(rows, 1))
    series.sends.append(sends / max(tokens, 1))
