"""Which dispatchers and experts can run on this machine, each refusal with its reason: `python -m moe_ep doctor`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import DispatchConfig, MoEConfig
from .dispatch import Capabilities, Dispatcher, find_dispatcher, known_dispatchers
from .dispatch.capabilities import capability_reasons
from .errors import MoEError
from .experts_registry import find_experts, known_experts
from .machine import machine, num_gpus
from .routing import Routing

DEFAULT = str(next(field.default for field in dataclasses.fields(MoEConfig) if field.name == "dispatcher"))


def diagnose() -> dict[str, Any]:
    """The whole report, ready for JSON.

    Returns:
        `machine()` plus `dispatchers`: name to {usable, reasons, findings, conditions}; `experts`: name to {usable,
        reasons, findings}; `default`: the name of the default dispatcher; `works`: whether it can run here and moved
        rows as it should.
    """
    found = {name: examine(name) for name in known_dispatchers()}
    experts = {name: examine_experts(name) for name in known_experts()}
    works = found[DEFAULT]["usable"]
    return {**machine(), "dispatchers": found, "experts": experts, "default": DEFAULT, "works": works}


def examine(name: str) -> dict[str, Any]:
    """Whether a dispatcher can run here with some configuration, why not, and what such a configuration must have."""
    try:
        cls = find_dispatcher(name)
        findings = cls.findings()
        reasons = machine_reasons(name, cls)
    except MoEError as err:
        return {"usable": False, "reasons": [str(err)], "findings": [], "conditions": []}
    except Exception as err:  # a third-party back end may fail in any way, and the report must go on
        reason = f"finding out failed: {type(err).__name__}: {err}"
        return {"usable": False, "reasons": [reason], "findings": [], "conditions": []}
    if name == DEFAULT and not reasons:
        reasons = trial(cls)
    caps = cls.capabilities
    return {
        "usable": not reasons,
        "reasons": reasons,
        "findings": findings,
        "conditions": conditions(caps),
        "capabilities": dataclasses.asdict(caps),
    }


def examine_experts(name: str) -> dict[str, Any]:
    """Whether experts can run here with some configuration, why not, and what was found of what they need."""
    findings: list[str] = []
    try:
        cls = find_experts(name)
        findings = cls.findings()
        reasons = cls.machine_reasons()
    except MoEError as err:
        reasons = [str(err)]
    except Exception as err:  # a library may fail in any way, and the report must go on
        reasons = [f"finding out failed: {type(err).__name__}: {err}"]
    return {"usable": not reasons, "reasons": reasons, "findings": findings}


def machine_reasons(name: str, cls: type[Dispatcher]) -> list[str]:
    """Sentences that say what this machine lacks for a dispatcher, under the configuration that suits it best."""
    caps, gpus = cls.capabilities, num_gpus()
    if "cpu" not in caps.devices and gpus == 0:
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
        return [f"it needs a CUDA GPU, and {why}"]
    if gpus == 0 and caps.rank_counts != (1,) and not dist.is_gloo_available():
        return ["its ranks on CPUs talk through gloo, and torch is built without it"]
    # on CPUs any number of processes can be ranks; GPUs take one each
    ranks = [n for n in caps.rank_counts or (1,) if "cpu" in caps.devices or n <= gpus]
    if not ranks:
        wanted = ", ".join(map(str, caps.rank_counts or ()))
        return [f"it serves {wanted} ranks, one GPU each, and this machine has {gpus} GPU(s)"]
    config = suitable_config(name, caps, max(ranks))
    return capability_reasons(caps, config, max(ranks)) or cls.unavailable_reasons(config, None)


def suitable_config(name: str, caps: Capabilities, num_ranks: int) -> DispatchConfig:
    """A small configuration within a back end's own limits, so that what it still refuses is the machine's fault."""
    router = caps.routers[0] if caps.routers else "softmax"
    return DispatchConfig(
        name=name,
        num_experts=4 * num_ranks,
        top_k=num_ranks if router == "grouped" else min(2, caps.max_top_k or 2),
        hidden_size=-(-64 // caps.hidden_multiple) * caps.hidden_multiple,
        dtype="float32" if "float32" in caps.dtypes else caps.dtypes[0],
        max_tokens=64,
        router=router,
        num_groups=num_ranks if router == "grouped" else 0,
    )


def conditions(caps: Capabilities) -> list[str]:
    """What a configuration must have for a back end, in words."""
    limits = [
        (caps.rank_counts is not None, f"{', '.join(map(str, caps.rank_counts or ()))} rank(s)"),
        (len(caps.devices) == 1, f"tensors on {caps.devices[0]}"),
        (len(caps.dtypes) == 1, f"dtype {caps.dtypes[0]}"),
        (caps.hidden_multiple > 1, f"a hidden size that is a multiple of {caps.hidden_multiple}"),
        (caps.max_hidden is not None, f"a hidden size of at most {caps.max_hidden}"),
        (caps.max_top_k is not None, f"a top-k of at most {caps.max_top_k}"),
        (caps.routers is not None, f"router {' or '.join(caps.routers or ())}"),
        (caps.needs_max_tokens, "max_tokens set"),
        (not caps.duplicates, "no expert twice in one token's top-k"),
        (not caps.unequal_tokens, "equally many tokens on all ranks"),
        (not caps.zero_tokens, "at least one token on every rank"),
        (not caps.deterministic, "results that may differ from run to run"),
        (bool(caps.packages), f"packages {', '.join(caps.packages)}"),
    ]
    return [text for holds, text in limits if holds]


def trial(cls: type[Dispatcher]) -> list[str]:
    """Move a few rows on this one rank, with experts that scale by id + 1; sentences on what went wrong."""
    config = suitable_config(cls.name, cls.capabilities, 1)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    routing = Routing(expert_ids=torch.tensor([[0, 3], [1, -1], [2, 2]]), weights=weights, num_experts=4)
    x_TH = torch.arange(3.0 * config.hidden_size).view(3, -1)
    expected = x_TH * torch.tensor([[0.25 * 1 + 0.75 * 4], [0.5 * 2], [1.0 * 3]])
    try:
        dispatcher = cls(config, None)
        y_TH = _pass_through(dispatcher, x_TH, routing)
        dispatcher.close()
    except Exception as err:
        return [f"a trial on one rank failed: {type(err).__name__}: {err}"]
    return [] if torch.equal(y_TH, expected) else ["a trial on one rank moved rows to wrong places"]


def _pass_through(dispatcher: Dispatcher, x_TH: Tensor, routing: Routing) -> Tensor:
    ticket = dispatcher.dispatch_preprocess(x_TH, routing)
    dispatcher.dispatch(ticket)
    rows = dispatcher.dispatch_postprocess(ticket)
    experts = torch.arange(rows.num_local_experts)
    scale = rows.row_weights.new_zeros(rows.capacity)
    scale[: int(rows.offsets[-1])] = (experts + 1.0).repeat_interleave(rows.tokens_per_expert)
    dispatcher.combine_preprocess(ticket, rows.rows() * (scale * rows.row_weights)[:, None])
    dispatcher.combine(ticket)
    return dispatcher.combine_postprocess(ticket)


def to_text(report: dict[str, Any]) -> str:
    """The report for a person: one fact a line, aligned."""
    facts = [*_software(report), *_hardware(report)]
    lines = [f"{label:<12}{text}" for label, text in facts]
    width = max(map(len, (*report["dispatchers"], *report["experts"]))) + 2
    lines += ["", "dispatchers"]
    for name, found in report["dispatchers"].items():
        state = "usable" if found["usable"] else "not usable"
        with_what = f"with {', '.join(found['conditions'])}" if found["conditions"] else ""
        words = with_what if found["usable"] else "; ".join(found["reasons"])
        lines.append(f"  {name:<{width}}{state:<12}{words}".rstrip())
        more = (*found["findings"], *found.get("capabilities", {}).get("notes", ()))
        lines += [f"  {'':<{width + 12}}{text}" for text in more]
    lines += ["", "experts"]
    for name, found in report["experts"].items():
        state, words = ("usable", "") if found["usable"] else ("not usable", "; ".join(found["reasons"]))
        lines.append(f"  {name:<{width}}{state:<12}{words}".rstrip())
        lines += [f"  {'':<{width + 12}}{text}" for text in found["findings"]]
    verdict = "works" if report["works"] else "does not work here"
    return "\n".join([*lines, "", f"The default dispatcher, {report['default']}, {verdict}."])


def _software(report: dict[str, Any]) -> list[tuple[str, str]]:
    cuda = report["cuda_missing"] or f"{report['cuda']}, driver {report['driver'] or 'version unknown'}"
    nccl = report["nccl_missing"] or (
        f"compiled with {report['nccl_compiled']}, loaded {report['nccl_loaded'] or 'with torch itself'}"
    )
    gloo = "present" if report["gloo"] else "missing: ranks on CPUs cannot talk to each other"
    return [
        ("moe_ep", report["moe_ep"]),
        ("Python", f"{report['python']} on {report['system']}, {report['cores']} cores"),
        ("torch", report["torch"]),
        ("CUDA", cuda),
        ("nvcc", report["nvcc"] or "missing: kernels that are not built yet cannot be, and torch moves the rows"),
        ("NCCL", nccl),
        ("gloo", gloo),
    ]


def _hardware(report: dict[str, Any]) -> list[tuple[str, str]]:
    gpus = report["gpus"]
    if not gpus:
        return [("GPUs", "none")]
    facts = [
        (
            f"GPU {i}",
            f"{g['name']}, {g['memory_mib']} MiB, compute capability {g['sm']}, {g['sms']} SMs; kernels {g['kernels']}",
        )
        for i, g in enumerate(gpus)
    ]
    for i, row in enumerate(report["peer_access"]):
        for j, reachable in enumerate(row[:i]):
            how = report["links"][i][j] if report["links"] else "link unknown"
            facts.append((f"GPU {j} - {i}", f"{how}, peer access {'yes' if reachable else 'no'}"))
    return facts
