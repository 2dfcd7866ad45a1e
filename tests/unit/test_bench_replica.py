"""The floor of planning and rerouting counts every input and every output once."""

from __future__ import annotations

import pytest
import torch

from moe_ep.replica import plan
from tools.bench_replica import case, main, moved_bytes
from tools.synthetic_traces import Synthetic


def test_bytes_are_those_of_the_tensors() -> None:
    spec = Synthetic(R=4, E=16, K=2, T=32, steps=1, micro_batches=1, skew=1.5)
    load, ids = case(spec)
    made = plan(load, 2)
    tables = sum(t.numel() * 4 for t in (load, made.quota, made.instances))
    assert moved_bytes("plan", spec, 2) == tables + made.max_load.nbytes * 2
    assert moved_bytes("reroute", spec, 2) == tables + 2 * ids.numel() * ids.element_size()
    assert moved_bytes("fixed_rows", spec, 4) == moved_bytes("plan", spec, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_nothing_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "torch finds no CUDA GPU here" in capsys.readouterr().err
