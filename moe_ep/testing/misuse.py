"""Drivers for what a dispatcher has to refuse: stages out of order, and bad input on one rank only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dispatch import Stage
from ..errors import CapacityError, InputError, MoEError, NonFiniteError, PeerError, ProtocolError
from .bench import Bench, MicroBatch
from .cases import LAYER


def drive_protocol(bench: Bench) -> None:
    """At every point of a ticket's life each wrong stage is refused, and the right one with gradients off.

    Without harm: the ticket's result stays right.
    """
    batch = bench.micro_batch(1)
    batch.preprocess()
    right_way: list[Callable[[], None]] = [batch.dispatch, batch.experts, batch.combine, batch.finish]
    following = [Stage.DISPATCH, Stage.DISPATCH_POSTPROCESS, Stage.COMBINE, Stage.COMBINE_POSTPROCESS]
    for advance, expected in zip(right_way, following, strict=True):
        _try_wrong_stages(bench, batch, expected)
        advance()
    _try_wrong_stages(bench, batch, None)
    batch.backward()
    batch.record()


def _try_wrong_stages(bench: Bench, batch: MicroBatch, expected: Stage | None) -> None:
    d, ticket = bench.dispatcher, batch.ticket
    y_NH = torch.zeros(0, bench.case.hidden, dtype=batch.x.dtype, device=bench.device)
    calls: dict[Stage, Callable[[], object]] = {
        Stage.DISPATCH: lambda: d.dispatch(ticket),
        Stage.DISPATCH_POSTPROCESS: lambda: d.dispatch_postprocess(ticket),
        Stage.COMBINE_PREPROCESS: lambda: d.combine_preprocess(ticket, y_NH),
        Stage.COMBINE: lambda: d.combine(ticket),
        Stage.COMBINE_POSTPROCESS: lambda: d.combine_postprocess(ticket),
    }
    for called, call in calls.items():
        place = [called.label, f"layer {LAYER}", "micro-batch 1"]
        if called == expected:
            with torch.no_grad():
                _refused(bench, call, [*place, "gradients are not recorded"], f"{called.label} with gradients off")
            continue
        where = "on a released ticket" if expected is None else f"where {expected.label} was due"
        wanted = [*place, "released" if expected is None else expected.label]
        _refused(bench, call, wanted, f"{called.label} {where}")


def _refused(bench: Bench, call: Callable[[], object], words: list[str], what: str) -> None:
    try:
        call()
    except ProtocolError as err:
        bench.report.problems += [f"{err!s} does not say {word!r}" for word in words if word not in str(err)]
    else:
        bench.report.problems.append(f"{what} was not refused")


def _bad_ids(batch: MicroBatch, value: int) -> None:
    batch.ids[-1, -1] = value


def _too_many(batch: MicroBatch) -> None:
    rows = batch.bench.case.max_tokens + 1
    batch.x, batch.weights = (t.detach()[:1].expand(rows, -1) for t in (batch.x, batch.weights))
    batch.ids = batch.ids[:1].expand(rows, -1)


def _wider(batch: MicroBatch) -> None:
    batch.ids, batch.weights = (torch.cat([t, t[:, :1]], dim=1) for t in (batch.ids, batch.weights.detach()))


def _set(batch: MicroBatch, **values: object) -> None:
    for name, value in values.items():
        setattr(batch, name, value)


# name -> (what to do to the input, the error where it is done, words of its message)
FAULTS: dict[str, tuple[Callable[[MicroBatch], None], type[MoEError], str]] = {
    "bad_id": (lambda b: _bad_ids(b, b.num_experts), InputError, "1 expert ids lie outside"),
    "bad_negative_id": (lambda b: _bad_ids(b, -2), InputError, "1 expert ids lie outside"),
    "too_many_tokens": (_too_many, CapacityError, "tokens are more than max_tokens ="),
    "wrong_hidden": (lambda b: _set(b, x=b.x.detach()[:, 1:]), InputError, "x must be [T, "),
    "wrong_dtype": (lambda b: _set(b, x=b.x.detach().half()), InputError, "x is torch.float16"),
    "wrong_top_k": (_wider, InputError, "expert_ids must be ["),
    "wrong_num_experts": (lambda b: _set(b, num_experts=b.num_experts + 1), InputError, "the routing has 9 experts"),
    "non_finite": (
        lambda b: _set(b, bad_tokens=torch.tensor(2, device=b.ids.device)),
        NonFiniteError,
        "non-finite router logits in 2 tokens",
    ),
}


def drive_fault(bench: Bench) -> None:
    """Bad input on the last rank (or on two): its own error there, a PeerError that names it elsewhere; all go on."""
    last = bench.case.num_ranks - 1
    two = bench.case.argument == "two"
    faults = {0: "bad_id", last: "too_many_tokens"} if two else {last: bench.case.argument}
    batch = bench.micro_batch(0)
    wanted: type[MoEError] = PeerError
    words = f"rank {min(faults)} "
    if bench.rank in faults:
        spoil, wanted, words = FAULTS[faults[bench.rank]]
        spoil(batch)
    try:
        batch.forward()
    except MoEError as err:
        _judge_error(bench, err, wanted, words)
    else:
        # a run without a host sync: the record on the device has it, and every rank raises the fault's own error
        _, wanted, words = FAULTS[max(faults.values())]
        try:
            bench.dispatcher.raise_if_faulted()
        except MoEError as err:
            _judge_error(bench, err, wanted, words)
        else:
            bench.report.problems.append(
                f"no {wanted.__name__}, at once or in the record, although {faults} went wrong"
            )
    bench.micro_batch(1).run()


def _judge_error(bench: Bench, err: MoEError, wanted: type[MoEError], words: str) -> None:
    if type(err) is not wanted:
        bench.report.problems.append(f"{type(err).__name__} instead of {wanted.__name__}: {err}")
    expected = [words, f"layer {LAYER}", "micro-batch 0"]
    bench.report.problems += [f"{err!s} does not say {word!r}" for word in expected if word not in str(err)]
