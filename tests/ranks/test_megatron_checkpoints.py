"""Megatron's distributed checkpoints of a GPT with our dispatchers and without: each loads what the other wrote."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu as cpu

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (moe-ep[megatron])")


def with_bias(ours: str | None, pieces: int = 1) -> Any:
    from moe_ep.integrations.megatron import use_domino

    model = cpu.build(
        ours, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=24, moe_layer_freq=[0, 1],
    )  # fmt: skip
    return use_domino(model, pieces) if pieces > 1 else model


@contextlib.contextmanager
def writers() -> Iterator[None]:
    """Megatron writes from processes of its own, which a rank of a test must not have, and asks psutil for memory."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    memory = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
    with (
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
        mock.patch.object(filesystem_async, "HAVE_PSUTIL", True, create=True),
        mock.patch.object(filesystem_async, "psutil", SimpleNamespace(Process=lambda _: memory), create=True),
    ):
        yield


def place_of(entry: Any) -> tuple[str, ...]:
    """Where an entry of a sharded_state_dict goes in the whole."""
    return (entry.key, *(str(getattr(entry, name, "")) for name in ("global_shape", "global_offset", "replica_id")))


def written_and_read(group: Any, rank: int, folder: str) -> Any:
    from megatron.core import dist_checkpointing

    kinds: list[Any] = [(None, 1), ("all2all", 1), ("all2all", 2)]
    same, described = [], []
    with cpu.on_cpu(), cpu.parallel(2), writers():
        for number, (ours, pieces) in enumerate(kinds):
            source, path = with_bias(ours, pieces), Path(folder) / str(number)
            with torch.no_grad():
                for tensor in (*source.parameters(), source.decoder.layers[1].mlp.router.expert_bias):
                    tensor.normal_(generator=torch.Generator().manual_seed(tensor.numel()))
            path.mkdir(exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(source.sharded_state_dict(), str(path))
            described.append(sorted(map(place_of, source.sharded_state_dict().values())))
            for other in kinds:
                target = with_bias(*other)
                target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(), str(path)))
                pairs = zip(source.state_dict().items(), target.state_dict().items(), strict=True)
                tensors = [(a, b) for (_, a), (_, b) in pairs if isinstance(a, torch.Tensor)]
                assert len(tensors) > 20
                same.append(all(torch.equal(a, b) for a, b in tensors))
    return same, described


def test_each_loads_what_the_others_wrote(tmp_path: Path) -> None:
    with RankPool(2, timeout_s=120) as pool:
        results = pool.run(written_and_read, str(tmp_path))
    for same, _ in results:
        assert same == [True] * 9
    names = ["experts.experts.linear_fc1.weight", "router.expert_bias", "shared_experts.linear_fc2.weight"]
    written = [p.name for p in sorted(tmp_path.iterdir())]
    assert written == ["0", "1", "2"]
    for _, described in results:
        native, ours, pieces = described
        assert native == ours == pieces
        assert all(any(name in key for key, *_ in native) for name in names)
