"""Every case of the contract, by name. `table.py` says which dispatcher runs which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cases import Case

# T of each rank: odd, unequal, never the same twice
TOKENS = {1: (7,), 2: (5, 8), 4: (5, 3, 7, 2)}
# dispatch, experts and combine of several micro-batches in flight; see drivers.run_schedule
TWO = "p0 d0 p1 d1 e0 c0 e1 c1 f0 f1"
TWO_CROSSED = "p0 p1 d1 d0 e1 e0 c1 c0 f0 f1"
TWO_NESTED = "p0 d0 e0 p1 d1 e1 c1 c0 f1 f0"
THREE = "p0 d0 p1 d1 e0 p2 d2 c0 e1 e2 c1 f0 c2 f2 f1"
FOUR = "p0 d0 p1 d1 p2 d2 p3 d3 e0 c0 e1 c1 e2 c2 e3 c3 f0 f1 f2 f3"
TWO_LIFO = "p0 d0 p1 d1 e1 c1 e0 c0 f1 f0"
FOUR_LIFO = "p0 d0 p1 d1 p2 d2 p3 d3 e3 c3 e2 c2 e1 c1 e0 c0 f3 f2 f1 f0"
FOUR_WOVEN = "p0 p1 d0 p2 d1 e1 d2 c1 p3 e0 f1 d3 c0 e3 e2 c3 c2 f0 f3 f2"
FAULTS = (
    *("bad_id", "bad_negative_id", "too_many_tokens", "wrong_hidden", "wrong_dtype", "wrong_top_k"),
    *("wrong_num_experts", "non_finite"),
)


def _family(name: str, ranks: tuple[int, ...] = (1, 2, 4), **fields: Any) -> list[Case]:
    """One case for each number of ranks; `tokens` may be a table by number of ranks."""
    tokens = fields.pop("tokens", TOKENS)
    sizes = {"num_experts": 8, "top_k": 2} | fields
    return [Case(name=f"{name}/R{r}", num_ranks=r, tokens=tokens[r], **sizes) for r in ranks]


_ROUTING = [
    *_family("uniform"),
    *_family("skewed", routing="skewed"),
    *_family("all-to-one-expert", routing="one_expert", top_k=1),
    *_family("all-to-one-rank", (2, 4), routing="last_rank"),
    *_family("one-local-one-remote-expert", (2, 4), routing="local_and_remote"),
    *_family("idle-experts", routing="even_experts"),
    *_family("zero-tokens-on-some-ranks", (2, 4), tokens={2: (0, 6), 4: (0, 5, 0, 3)}),
    *_family("zero-tokens-on-all-but-one", (2, 4), tokens={2: (6, 0), 4: (0, 0, 5, 0)}),
    *_family("zero-tokens-everywhere", tokens={1: (0,), 2: (0, 0), 4: (0, 0, 0, 0)}),
    *_family("one-token", tokens={1: (1,), 2: (1, 0), 4: (1, 0, 0, 1)}),
    *_family("no-route-slots", routing="holes", top_k=3),
    *_family("padding-tokens", routing="padding", tokens={1: (16,), 2: (16, 12), 4: (16, 12, 8, 4)}),
    *_family("no-routes-on-a-rank", (2, 4), routing="no_routes_on_last_rank"),
    *_family("no-routes-anywhere", routing="no_routes"),
    *_family("duplicates", routing="duplicates", top_k=3),
    *_family("top-1", top_k=1),
    *_family("top-k-is-all-experts", top_k=8),
    *_family("one-expert-per-rank", (2, 4), routing="duplicates", num_experts=4, top_k=3),
    *_family("one-expert-on-each-of-two", (2,), num_experts=2),
    *_family("17-experts-per-rank", (2,), num_experts=34, top_k=5),
    *_family("512-experts", (2,), num_experts=512, top_k=10, tokens={2: (4, 3)}),
    *_family("constant-experts", routing="duplicates", num_experts=16, top_k=4, experts="constant", weights="eighths"),
    *_family(
        "asymmetric-tokens",
        (4,),
        num_experts=16,
        top_k=4,
        experts="constant",
        weights="eighths",
        tokens={4: (3, 5, 7, 0)},
    ),
    *_family("grouped-router", (2,), routing="grouped"),
    *_family("grouped-router", (4,), routing="grouped", top_k=4),
]
_VALUES = [
    *_family("bfloat16", dtype="bfloat16", top_k=4),
    *_family("float16", (2,), dtype="float16", top_k=4),
    *_family("float64", (2,), dtype="float64"),
    *_family("tiny-weights", weights="tiny"),
    *_family("tiny-weights-bfloat16", (2,), weights="tiny", dtype="bfloat16"),
    *_family(
        "float32-accumulation",
        (1,),
        num_experts=8,
        top_k=8,
        routing="last_rank",
        dtype="bfloat16",
        experts="constant",
        weights="powers",
    ),
    *_family(
        "float32-accumulation",
        (2,),
        num_experts=16,
        top_k=8,
        routing="last_rank",
        dtype="bfloat16",
        experts="constant",
        weights="powers",
    ),
    *_family("int32-ids", ids_dtype="int32", routing="holes"),
    *_family("odd-hidden", hidden=7),
    *_family("odd-hidden-bfloat16", (2,), hidden=5, dtype="bfloat16"),
    *_family("hidden-1", (2,), hidden=1),
    *_family("transposed-x", x_layout="transposed"),
    *_family("sliced-x", x_layout="slice"),
    *_family("expanded-gradient", dy_layout="expanded"),
    *_family("transposed-gradient", dy_layout="transposed"),
    *_family("x-needs-no-grad", grads="weights"),
    *_family("weights-need-no-grad", grads="x"),
    *_family("no-grad", grads="none"),
    *_family("grad-on-one-rank-only", (2, 4), grads="first_rank"),
    *_family("no-process-group", (1,), group=False, routing="holes"),
]
_TICKETS = [
    *_family("two-tickets", driver="schedule", argument=f"{TWO} | joint"),
    *_family("two-tickets-backward-0-1", driver="schedule", argument=f"{TWO} | 0 1"),
    *_family("two-tickets-backward-1-0", driver="schedule", argument=f"{TWO} | 1 0"),
    *_family("two-tickets-crossed", driver="schedule", argument=f"{TWO_CROSSED} | 0 1"),
    *_family("two-tickets-nested", driver="schedule", argument=f"{TWO_NESTED} | joint"),
    *_family("three-tickets-backward-1-2-0", driver="schedule", argument=f"{THREE} | 1 2 0"),
    *_family("four-tickets", driver="schedule", argument=f"{FOUR} | joint", routing="holes"),
    *_family("four-tickets-backward-2-0-3-1", driver="schedule", argument=f"{FOUR} | 2 0 3 1"),
    *_family("four-tickets-no-grad", (2,), driver="schedule", argument=f"{FOUR} | none", grads="none"),
    *_family("two-tickets-last-in-first-out", driver="schedule", argument=f"{TWO_LIFO} | 1 0"),
    *_family("four-tickets-last-in-first-out", driver="schedule", argument=f"{FOUR_LIFO} | 0 1 2 3"),
    *_family("four-tickets-woven", driver="schedule", argument=f"{FOUR_WOVEN} | joint", routing="holes"),
    *_family("source-is-kept", driver="source", routing="holes"),
    *_family("stage-out-of-order", driver="protocol"),
    *_family("abandoned-tickets", driver="abandoned"),
    *_family("tensors-are-freed", driver="memory", routing="holes"),
    *_family("backward-twice", driver="backward twice"),
    *_family("recompute", driver="recompute", argument="early stop"),
    *_family("recompute-without-early-stop", driver="recompute", argument="no early stop"),
    *_family(
        "recompute-with-an-empty-rank", (2, 4), driver="recompute", argument="early stop",
        tokens={2: (0, 6), 4: (0, 5, 0, 3)},
    ),
    *_family("changing-tokens-20-steps", driver="steps", argument="20"),
    *_family("one-expert-per-rank-30-steps", (2,), num_experts=2, driver="steps", argument="30"),
    *_family("poisoned-memory-3-steps", driver="steps", argument="3", routing="holes", dtype="bfloat16"),
]  # fmt: skip
_FAULTS = [
    case
    for fault in FAULTS
    for case in _family(f"fault-{fault.replace('_', '-')}", driver="fault", argument=fault)
]  # fmt: skip
_FAULTS += _family("faults-on-two-ranks", (4,), driver="fault", argument="two")
_CONFIG = [
    *_family("max-tokens-unset", config=(("max_tokens", None),)),
    *_family("experts-not-divisible", (4,), num_experts=6),
    *_family("top-k-above-experts", (1, 2), num_experts=2, top_k=3, routing="duplicates"),
    *_family("capacity-factor", (1, 2), config=(("capacity_factor", 2.0),)),
    *_family("num-sms", (1, 2), config=(("num_sms", 8),)),
    *_family("unknown-option", (1, 2), config=(("options", (("no_such_key", 1),)),)),
]


def _grouped(name: str, **fields: Any) -> list[Case]:
    """The grouped router's promise, R groups with column j on rank j, is part of the configuration."""
    return [
        case
        for r in (1, 2, 4)
        for case in _family(
            name, (r,), routing="grouped", top_k=r, config=(("router", "grouped"), ("num_groups", r)), **fields
        )
    ]


_GROUPED = [
    *_grouped("grouped-static-rows"),
    *_grouped("grouped-static-rows-bfloat16", dtype="bfloat16"),
    *_grouped("grouped-static-rows-four-tickets", driver="schedule", argument=f"{FOUR} | joint"),
    *_grouped("grouped-static-rows-some-empty", tokens={1: (0,), 2: (0, 6), 4: (0, 5, 0, 3)}),
    *_grouped("grouped-static-rows-fault", driver="fault", argument="bad_id"),
    *_grouped("grouped-static-rows-non-finite", driver="fault", argument="non_finite"),
]
CASES: tuple[Case, ...] = (*_ROUTING, *_VALUES, *_TICKETS, *_FAULTS, *_GROUPED, *_CONFIG)


def _on_eight(case: Case) -> Case:
    """A case of four ranks on eight: twice the tokens; twice the experts where one rank's are else too few, or odd."""
    few = case.num_experts % 8 or (case.routing == "last_rank" and case.num_experts // 8 < case.top_k)
    experts = 2 * case.num_experts if few else case.num_experts
    config = tuple((key, 8 if key == "num_groups" else value) for key, value in case.config)
    top_k = 8 if case.routing == "grouped" else case.top_k
    return replace(
        case, name=case.name.replace("/R4", "/R8"), num_ranks=8, num_experts=experts, top_k=top_k, config=config,
        tokens=case.tokens + case.tokens[::-1],
    )  # fmt: skip


# What four ranks are held to, for hosts with eight GPUs; tables have no rows of it: it runs where four ranks run.
EIGHT: tuple[Case, ...] = tuple(_on_eight(case) for case in CASES if case.num_ranks == 4 and case not in _CONFIG)
