"""A collective that fails while it is launched, as NCCL's do once a rank is known to be lost, names what it was for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.errors import PeerError
from moe_ep.peers import is_everywhere, mark_everywhere
from moe_ep.streams import CommStream

WHAT = "dispatch of layer 3, micro-batch 1"


def launch(err: Exception) -> None:
    def fail() -> tuple[tuple[Tensor, ...], list[object]]:
        raise err

    CommStream(torch.device("cpu"), None).launch(WHAT, fail)


@pytest.mark.parametrize(
    "err",
    [
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        dist.DistNetworkError("Connection reset by peer"),
        RuntimeError("[../tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40138"),
    ],
)
def test_a_lost_rank_is_a_peer_error_that_names_the_communication(err: Exception) -> None:
    with pytest.raises(PeerError, match=f"^{WHAT}: communication with the other ranks failed") as caught:
        launch(err)
    assert caught.value.__cause__ is err


@pytest.mark.parametrize("err", [RuntimeError("shape mismatch"), torch.OutOfMemoryError("no memory"), ValueError("x")])
def test_what_is_wrong_on_this_rank_stays_what_it_is(err: Exception) -> None:
    with pytest.raises(type(err)) as caught:
        launch(err)
    assert caught.value is err


def test_only_what_a_collective_says_is_known_to_all_ranks() -> None:
    gone = [PeerError("x"), dist.DistBackendError("x"), RuntimeError("[../tcp/pair.cc:534] Connection closed by peer")]
    own = [RuntimeError("socket of the experts: timed out"), torch.OutOfMemoryError("x"), ValueError("[a.cc:1] x")]
    assert all(is_everywhere(err) for err in gone) and not any(is_everywhere(err) for err in own)
    for err in own:
        mark_everywhere(err)
    assert all(is_everywhere(err) for err in own)
