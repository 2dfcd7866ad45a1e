"""What one rank prints and returns when it fails alone: before it met the others, or because they never came."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ep.errors import CheckpointError, MoEError, NonFiniteError, PeerError, RecipeError
from moe_ep.peers import is_lost_peer
from recipes import build, convert, program
from recipes.ranks import Launch, mark_agreed
from recipes.report import report
from tests.ranks.small_recipe import write

FIRST, SECOND = Launch(0, 2, 0, 2), Launch(1, 2, 1, 2)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch, port: int):
    """Sets the launcher's variables for one rank of 2."""

    def rank(number: int, **more: str) -> None:
        variables = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}.items():
            monkeypatch.setenv(name, value)

    return rank


@pytest.fixture
def agent(port: int) -> Iterator[dict[str, str]]:
    """The store of a torchrun agent, and the variables that say so."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    yield {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
    del store


@pytest.fixture
def small(tmp_path: Path) -> str:
    return str(write(tmp_path))


PLAIN = ["model.num_shared_experts=0", "model.shared_intermediate_size=0"]
MAINS = {
    "pretrain": lambda *arguments: program.main([*arguments]),
    "export": lambda recipe, *rest: convert.main(["export", recipe, "out", *PLAIN, *rest]),
}
REFUSALS = {
    "no recipe": (
        ["nope.toml"],
        "nope.toml: cannot read the recipe: No such file or directory; a relative path starts at the working dir",
    ),
    "unknown key": (["train.stepz=1"], "unknown key 'stepz'"),
    "a GPU that is not there": (["parallel.ep_size=2", "parallel.backend=nccl"], "backend = 'nccl' needs a GPU"),
}


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize("name", MAINS)
def test_a_refusal_on_a_later_rank_alone_is_said(be, small, capsys, name, what) -> None:
    if "GPU" in what and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    be(1)
    arguments, text = REFUSALS[what]
    assert MAINS[name](*([] if what == "no recipe" else [small]), *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("refused: ") and text in said
    assert said.count("\n") == 1


def test_ranks_of_one_node_say_the_same_refusal_once_under_torchrun(be, agent, capsys) -> None:
    for rank in (1, 0):
        be(rank, **agent)
        assert program.main(["nope.toml"]) == 2
        assert capsys.readouterr().err.count("nope.toml") == (1 if rank == 1 else 0)
    assert program.main(["other.toml"]) == 2  # another sentence
    be(0, **{**agent, "GROUP_RANK": "1"})  # another node
    assert program.main(["nope.toml"]) == 2
    assert capsys.readouterr().err.count("refused: ") == 2


@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("pretrain", 0, "only 1 of 2 ranks came within 1 s (train.timeout_s)"),
        ("pretrain", 1, "where rank 0 should be, within 1 s"),
        ("export", 0, "only 1 of 2 ranks came within 1 s (train.timeout_s)"),
    ],
)
def test_a_rank_that_never_comes_ends_the_other_with_3_and_a_sentence(be, small, capfd, name, rank, said) -> None:
    be(rank)
    assert MAINS[name](small, "parallel.ep_size=2", "train.timeout_s=1") == 3
    output = capfd.readouterr().err
    assert said in output and "look at the first error among all ranks" in output
    assert "Traceback" not in output


def test_a_rank_that_never_comes_is_named_where_gloo_names_it(be, agent, small, capfd) -> None:
    be(0, **agent)
    assert program.main([small, "parallel.ep_size=2", "train.timeout_s=1"]) == 3
    assert "rank 1 of 2 did not come within 1 s" in capfd.readouterr().err
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_no_lost_rank(be, small, port, capfd) -> None:
    be(0)
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        assert program.main([small, "parallel.ep_size=2", "train.timeout_s=1"]) == 2
    assert f"another program listens on 127.0.0.1:{port}; choose a free port" in capfd.readouterr().err


def test_every_error_of_torch_distributed_means_a_lost_peer() -> None:
    kinds = (dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    assert all(is_lost_peer(kind("x")) for kind in kinds)
    assert is_lost_peer(RuntimeError("[../tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40138"))
    assert not any(is_lost_peer(err) for err in (RuntimeError("shape mismatch"), NonFiniteError("gloo"), OSError("x")))


LAUNCHES = [
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE = 'abc' must be a whole number of at least 1"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE = '' must be"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0' must be"),
    ({"WORLD_SIZE": "1.5"}, "WORLD_SIZE = '1.5' must be"),
    ({"RANK": "2"}, "RANK = '2' must be a whole number from 0 to 1"),
    ({"RANK": "-1"}, "RANK = '-1' must be"),
    ({"RANK": ""}, "RANK is not set beside WORLD_SIZE = 2"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x' must be"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK = '2' must be a whole number from 0 to 1"),
    ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE = '3' must be a whole number from 1 to 2"),
    ({"MASTER_PORT": "port"}, "MASTER_PORT = 'port' must be a whole number from 1 to 65535"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT = '65536' must be"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set beside WORLD_SIZE = 2"),
]


@pytest.mark.parametrize(("variables", "said"), LAUNCHES)
@pytest.mark.parametrize("name", MAINS)
def test_a_launch_that_makes_no_sense_is_refused_in_one_line(be, small, capsys, name, variables, said) -> None:
    be(0, **variables)
    assert MAINS[name](small) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"refused: {said}") and output.count("\n") == 1
    assert "start all ranks with torchrun" in output


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "1", "LOCAL_RANK": "1"}, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": ""}],
)
def test_a_launch_that_makes_sense_is_read(be, variables) -> None:
    be(0, **variables)
    number = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert dataclasses.astuple(Launch.from_env()) == tuple(number.values())


TOO_LARGE = {
    "the model": ["model.vocab_size=1000000000000", "model.hidden_size=4096"],
    "the optimizer": [],
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_model_that_does_not_fit_is_this_ranks_own_failure(small, capsys, monkeypatch, what) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if not TOO_LARGE[what]:
        monkeypatch.setattr(build, "ShardedAdamW", full)
    place = [f"data.path={Path(small).parent / 'text'}", f"run.dir={Path(small).parent}", "parallel.ep_size=1"]
    assert program.main([small, *place, *TOO_LARGE[what]]) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"failed: MoEError: {small} [model]: the model does not fit into the memory of rank 0 (")
    assert output.count("\n") == 1 and "another rank" not in output


LOST = RuntimeError("[/pytorch/gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40138\nmore")
REPORTS = [
    (RecipeError("r"), SECOND, 2, "refused: r\n"),
    (mark_agreed(RecipeError("r")), FIRST, 2, "refused: r\n"),
    (mark_agreed(RecipeError("r")), SECOND, 2, ""),
    (mark_agreed(RecipeError("r")), Launch(8, 16, 0, 8), 2, "refused: r\n"),
    (CheckpointError("c"), SECOND, 1, "rank 1 failed: CheckpointError: c\n"),
    (mark_agreed(CheckpointError("c")), FIRST, 1, "failed: CheckpointError: c\n"),
    (mark_agreed(MoEError("m")), SECOND, 1, ""),
    (PeerError("p"), SECOND, 3, "rank 1: another rank failed or was lost, so this one stops: p\n"),
    (mark_agreed(PeerError("p")), SECOND, 3, ""),
]


@pytest.mark.parametrize(("err", "launch", "code", "said"), REPORTS)
def test_who_says_what(
    err: Exception, launch: Launch, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(err, launch) == code
    assert capsys.readouterr().err == said


def test_a_lost_peer_points_at_the_first_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(LOST, SECOND) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Connection closed by peer" in said and "look at the first error among all ranks" in said
