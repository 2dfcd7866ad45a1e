"""Rows on one rank: nothing travels, so they are written by the gather in front of the experts and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep.config import DispatchConfig
from moe_ep.debug import debug
from moe_ep.dispatch.registry import build_dispatcher
from moe_ep.dispatch.transfer import AllToAllRows, Flight, GatherRows, Transfer, finish, pack, start
from moe_ep.routing import Routing
from moe_ep.streams import comm_stream

T, H, E, K = 5, 16, 4, 3
GATHER = ["aten.index_select.default", "aten.masked_fill_.Scalar"]
EXPERTS = ["aten.mul.Tensor"]


class Written(TorchDispatchMode):
    """Notes each operation that writes a tensor of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.names = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if isinstance(out, Tensor) and tuple(out.shape) == self.shape and not is_view:
            self.names.append(str(func))
        return out


@pytest.mark.parametrize("name", ["all2all", "local"])
def test_expert_rows_are_gathered_once_each_way_and_not_copied(name: str) -> None:
    config = DispatchConfig(name=name, num_experts=E, top_k=K, hidden_size=H)
    dispatcher = build_dispatcher(config, None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, E, (T, K), generator=generator)
    weights = torch.rand(T, K, generator=generator).requires_grad_()
    routing = Routing(expert_ids=ids, weights=weights, num_experts=E)
    x = torch.randn(T, H, generator=generator, requires_grad=True)
    with Written((T * K, H)) as forward:
        ticket = dispatcher.dispatch_preprocess(x, routing)
        dispatcher.dispatch(ticket)
        rows = dispatcher.dispatch_postprocess(ticket)
        dispatcher.combine_preprocess(ticket, rows.rows() * rows.row_weights[:, None])
        dispatcher.combine(ticket)
        y = dispatcher.combine_postprocess(ticket)
    with Written((T * K, H)) as backward:
        y.backward(torch.ones_like(y))
    assert forward.names == [*GATHER, *EXPERTS]
    assert backward.names == [*GATHER, *EXPERTS, *EXPERTS], "of rows and of weights"
    assert x.grad is not None and weights.grad is not None
    total = weights.detach().sum(1, keepdim=True)
    torch.testing.assert_close(y.detach(), x.detach() * total)
    torch.testing.assert_close(x.grad, total.expand(T, H))
    torch.testing.assert_close(weights.grad, x.detach().sum(1, keepdim=True).expand(T, K))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    debug.cache_clear()
    yield
    debug.cache_clear()


def tripped(transfer: Transfer, x: Tensor) -> tuple[Tensor, Tensor]:
    """What `start` gives, before anybody has waited, and what `finish` gives of it."""
    packed, payload = pack(x)
    flight = Flight(transfer, comm_stream(x.device, None), "rows", packed)
    (sent,) = start(flight, *payload)
    before = sent.detach().clone()
    return before, finish(flight, sent)[0]


@pytest.mark.parametrize("transfer", [AllToAllRows(None, [6], [6], 6, 6), GatherRows(None, 1, 6)])
def test_rows_stay_where_they_are(transfer: Transfer) -> None:
    leaf = torch.arange(12.0).view(6, 2).requires_grad_()
    x, came = leaf * 1, list[int]()
    x.register_hook(lambda grad: came.append(grad.data_ptr()))
    _, out = tripped(transfer, x)
    assert out.data_ptr() == x.data_ptr() and torch.equal(out, leaf)
    dy = torch.arange(12.0).view(6, 2)
    out.backward(dy)
    assert came == [dy.data_ptr()]
    assert leaf.grad is not None and torch.equal(leaf.grad, dy)


def test_a_longer_buffer_gets_the_gradient_of_the_rows_that_travelled() -> None:
    x = torch.arange(12.0).view(6, 2).requires_grad_()
    _, out = tripped(AllToAllRows(None, [4], [4], 6, 4), x)
    assert out.data_ptr() == x.data_ptr() and torch.equal(out, x[:4])
    dy = torch.arange(8.0).view(4, 2)
    out.backward(dy)
    assert x.grad is not None and x.grad.shape == (6, 2) and torch.equal(x.grad[:4], dy)


@pytest.mark.parametrize("transfer", [AllToAllRows(None, [6], [6], 6, 6), GatherRows(None, 1, 6)])
def test_rows_that_are_made_late_get_memory_of_their_own(monkeypatch: pytest.MonkeyPatch, transfer: Transfer) -> None:
    monkeypatch.setenv("MOE_EP_RACE", "4")
    x = torch.arange(12.0).view(6, 2).requires_grad_()
    before, out = tripped(transfer, x)
    assert before.isnan().all(), "nobody has waited"
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
