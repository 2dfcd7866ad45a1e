"""num_sms of the dispatchers whose rows travel by NCCL: thread blocks of its kernels, seen in a trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEConfig, MoELayer
from moe_ep.dispatch import close_dispatchers
from moe_ep.testing.chrome_trace import trace_of
from moe_ep.testing.ranks import RankPool

pytestmark = pytest.mark.gpu(2, apart=True)  # NCCL moves rows between ranks of one GPU with few blocks


def body_blocks(group: dist.ProcessGroup, rank: int, name: str, num_sms: int | None) -> tuple[int, int, bool]:
    """Most thread blocks of a collective that moves rows, the SMs that experts leave free, and y as without a limit."""
    options = dict(
        hidden_size=2048, expert_intermediate_size=64, num_experts=8, top_k=4, dtype="bfloat16", max_tokens=4096,
        dispatcher=name,
    )  # fmt: skip
    x = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(rank)).to("cuda", torch.bfloat16)
    ys = []
    for limit in (None, num_sms):
        layer = MoELayer(MoEConfig(**options, num_sms=limit), group)  # type: ignore[arg-type]
        layer.reset_parameters(0)
        layer = layer.cuda()
        layer(x)
        with torch.profiler.profile() as profile:
            ys.append(layer(x)[0])
            torch.cuda.synchronize()
    grids = [event.args["grid"][0] for event in trace_of(profile).of("kernel") if "ncclDevKernel" in event.name]
    result = max(grids), layer.dispatcher.comm_sms, torch.equal(*ys)
    close_dispatchers(group)
    return result


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="cpu:gloo,cuda:nccl", device="cuda", timeout_s=120) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["all2all", "agrs"])
def test_rows_use_the_sms_that_the_configuration_gives(pool: RankPool, name: str) -> None:
    (free, _, _), *_ = pool.run(body_blocks, name, None)
    for blocks, declared, equal in pool.run(body_blocks, name, 8):
        assert blocks <= 8 < free
        assert declared == 8 and equal
