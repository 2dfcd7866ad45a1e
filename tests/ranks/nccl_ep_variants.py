"""`nccl_ep` under names of its own: by layout, and on the stand-in for the library, so that it runs on CPU ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import Capabilities, find_dispatcher, register_dispatcher
from tests.ranks import nccl_ep_double

NcclEp: Any = find_dispatcher("nccl_ep")


class OnDouble(NcclEp):  # type: ignore[misc]
    capabilities: ClassVar[Capabilities] = replace(NcclEp.capabilities, devices=("cpu",))
    on_gpu: ClassVar[bool] = False

    @classmethod
    def machine_reasons(cls) -> list[str]:
        return []

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"double": "1"}

    @staticmethod
    def find_library(group: dist.ProcessGroup) -> tuple[Any, Any]:
        return nccl_ep_double.library, nccl_ep_double.Communicator(group)


def with_options(config: DispatchConfig, **options: Any) -> DispatchConfig:
    merged = options | dict(config.options)
    return replace(config, options=tuple(sorted(merged.items())))


def variant(name: str, base: Any, **options: Any) -> None:
    """Register `base` with other defaults of its options under a name."""

    class Variant(base):  # type: ignore[misc]
        def __init__(self, config: DispatchConfig, group: dist.ProcessGroup | None) -> None:
            super().__init__(with_options(config, **options), group)

        @classmethod
        def unavailable_reasons(cls, config: DispatchConfig, group: dist.ProcessGroup | None) -> list[str]:
            reasons: list[str] = super().unavailable_reasons(with_options(config, **options), group)
            return reasons

    Variant.name = Variant.__qualname__ = name
    register_dispatcher(name)(Variant)


variant("nccl_ep-flat", NcclEp, layout="flat")
variant("nccl_ep-budget", NcclEp, budget_rows=4096)
variant("nccl_ep-low-latency", NcclEp, low_latency=True)
variant("double", OnDouble)
variant("double-flat", OnDouble, layout="flat")
variant("double-budget", OnDouble, budget_rows=4096)
variant("double-low-latency", OnDouble, low_latency=True)
