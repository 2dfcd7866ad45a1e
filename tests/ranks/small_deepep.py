"""`deepep` over doubles of the library (see deepep_double), and small micro-batches for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Capabilities, build_dispatcher, close_dispatchers, register_dispatcher
from moe_ep.dispatch.deepep import DeepEP
from moe_ep.errors import MoEError
from moe_ep.routing import Routing
from moe_ep.testing.table_deepep import DTYPE, HIDDEN
from tests.ranks import deepep_double


@register_dispatcher("deepep_double")
class DoubledDeepEP(DeepEP):
    """The adapter as it is, over the doubles and on the CPU."""

    name: ClassVar[str] = "deepep_double"
    capabilities: ClassVar[Capabilities] = replace(DeepEP.capabilities, devices=("cpu",))
    library: ClassVar[Any] = None

    @classmethod
    def load_library(cls) -> tuple[Any, str]:
        both = {**vars(deepep_double.V1), **vars(deepep_double.V2)}
        return type("deep_ep", (), both), ""

    @classmethod
    def machine_reasons(cls, api: str, num_sms: int) -> list[str]:
        return []

    @classmethod
    def sms_of_device(cls) -> int:
        return 132

    @classmethod
    def _own_device(cls) -> torch.device:
        return torch.device("cpu")

    def comm(self, device: torch.device) -> Any:
        link: Any = self.link
        return deepep_double.LateStream(super().comm(device), link._buffer)


def config(**changes: Any) -> DispatchConfig:
    sizes = dict(name="deepep_double", num_experts=8, top_k=2, hidden_size=HIDDEN, dtype=DTYPE, max_tokens=8)
    return DispatchConfig(**(sizes | changes))  # type: ignore[arg-type]


def micro_batch(rank: int, num_tokens: int = 4) -> tuple[torch.Tensor, Routing]:
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=gen).bfloat16().requires_grad_()
    ids = torch.rand(num_tokens, 8, generator=gen).argsort(1)[:, :2]
    return x, Routing(expert_ids=ids, weights=torch.rand(num_tokens, 2, generator=gen), num_experts=8)


def said_at_construction(group: dist.ProcessGroup, rank: int, changes: list[dict[str, Any]]) -> str:
    try:
        build_dispatcher(config(**changes[rank]), group)
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    finally:
        close_dispatchers(group)
    return "built"
