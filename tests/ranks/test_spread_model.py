"""The decoder with its experts spread over ranks: same logits, same text, and weights that go out and in on any R."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from moe_ep.errors import CheckpointError
from moe_ep.testing.ranks import RankPool
from recipes.generate import generate
from recipes.hf import export_hf, import_hf
from recipes.model import Decoder
from recipes.model_config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    expert_intermediate_size=16,
    init_std=0.3,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=60) as ranks:
        yield ranks


def decoder(dispatcher: str, group: dist.ProcessGroup | None, seed: int = 0) -> Decoder:
    model = Decoder(CONFIG, CONFIG.moe(dispatcher=dispatcher, max_tokens=64), group)
    model.reset_parameters(seed)
    return model


def logits(model: Decoder, rank: int) -> torch.Tensor:
    ids = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        return model(ids)[0]


def same_model(group: dist.ProcessGroup, rank: int, dispatcher: str) -> float:
    whole, spread = decoder("local", None), decoder(dispatcher, group)
    assert generate(spread, b"ab", 12, 1.0, 3, context=8) == generate(whole, b"ab", 12, 1.0, 3, context=8)
    return (logits(spread, rank) - logits(whole, rank)).abs().max().item()


@pytest.mark.parametrize("dispatcher", ["all2all", "agrs"])
def test_spread_experts_give_the_same_logits_and_text(pool: RankPool, dispatcher: str) -> None:
    assert max(pool.run(same_model, dispatcher)) <= 1e-5


def write(group: dist.ProcessGroup, rank: int, folder: str, sharded: bool) -> None:
    model = decoder("all2all", group)
    if sharded:
        shard(model, group)
    export_hf(model, folder, max_positions=16)


def shard(model: Decoder, group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    experts = {p for layer in model.layers for p in layer.moe.experts.parameters()}
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, ignored_params=experts)


def read(group: dist.ProcessGroup, rank: int, folder: str, sharded: bool) -> float:
    model = decoder("all2all", group, seed=1)
    if sharded:
        shard(model, group)
    before = (logits(model, rank) - logits(decoder("local", None), rank)).abs().max().item()
    assert before > 0.1, "the reader held the writer's weights already"
    import_hf(model, folder)
    return (logits(model, rank) - logits(decoder("local", None), rank)).abs().max().item()


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_written_by_four_ranks_are_read_by_any_number(pool: RankPool, tmp_path: Path, sharded: bool) -> None:
    pool.run(write, str(tmp_path), sharded)
    assert len(list(tmp_path.glob("model-*-of-00004.safetensors"))) == 4
    for num_ranks in (1, 2, 4):
        assert max(pool.run(read, str(tmp_path), sharded, num_ranks=num_ranks)) <= 1e-5


def read_damaged(group: dist.ProcessGroup, rank: int, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        import_hf(decoder("all2all", group), folder)
    return str(caught.value)


def test_a_lost_file_is_an_error_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(write, str(tmp_path), False)
    (tmp_path / "model-00003-of-00004.safetensors").unlink()
    messages = pool.run(read_damaged, str(tmp_path), num_ranks=2)
    assert all("model-00003-of-00004.safetensors cannot be read" in text for text in messages)
