"""XTuner's dispatcher interface in front of ours, so that its decoder layer runs on them as it stands.

    from moe_ep.integrations.xtuner import build_dispatcher

    layer.dispatcher = build_dispatcher("direct", n_routed_experts=64, ep_group=group, max_tokens=8192)

Stage names, keyword arguments and results are those of `xtuner.v1.module.dispatcher` (InternLM/xtuner, seen at
b934f4620): six stages whose results, dictionaries, the caller threads through. XTuner need not be installed. Its
dispatchers weigh the experts' outputs; so does this one, in `combine_preprocess`, which keeps the experts' output
[N, H] for backward. Not served: expert tensor parallelism, fp8 on the wire, decoding.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from ..config import Kernels
from ..dispatch import known_dispatchers
from ..errors import RecipeError
from ..schema import nearest
from .xtuner_dispatcher import ExpertWeightLayout, XTunerDispatcher

__all__ = ["ExpertWeightLayout", "XTunerDispatcher", "build_dispatcher"]


def build_dispatcher(
    dispatcher: str | None,
    n_routed_experts: int,
    *,
    ep_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
    ep_tp_group: dist.ProcessGroup | None = None,
    training_dtype: Literal["bf16", "fp8"] = "bf16",
    generate_dtype: Literal["bf16", "fp8"] = "bf16",
    hidden_size: int | None = None,
    top_k: int | None = None,
    dtype: str | None = None,
    max_tokens: int | None = None,
    capacity_factor: float | None = None,
    num_sms: int | None = None,
    kernels: Kernels = "auto",
    options: Mapping[str, Any] | None = None,
) -> XTunerDispatcher:
    """As XTuner's factory, with our dispatchers' names and, by keyword, their settings.

    Args:
        dispatcher: a registered name; None: "all2all". One rank: "local", with a warning as XTuner's.
        n_routed_experts: E.
        ep_group: expert-parallel ranks.
        tp_group: tensor-parallel ranks of an expert: one, or None.
        ep_tp_group: both together: no more ranks than `ep_group`, or None.
        training_dtype: "bf16"; rows travel in the dtype that they have.
        generate_dtype: "bf16".
        hidden_size: H, where it is to be known before the first micro-batch; else read from that.
        top_k: K, likewise.
        dtype: of the rows, likewise.
        max_tokens: see DispatchConfig, as are the following.
        capacity_factor: of rows without a host sync.
        num_sms: of a GPU, for communication.
        kernels: what moves rows.
        options: further keys of the back end.

    Raises:
        RecipeError: expert tensor parallelism, fp8, or with one rank a name that nobody knows.
        Unavailable, PeerError: see `moe_ep.build_dispatcher`.
    """
    _refuse_split_experts(tp_group, ep_group, ep_tp_group)
    for name, value in (("training_dtype", training_dtype), ("generate_dtype", generate_dtype)):
        if value != "bf16":
            raise RecipeError(f"{name} = {value!r} is not served: rows travel as they are; use 'bf16'")
    group = None if ep_group is None or ep_group.size() == 1 else ep_group
    known_names = known_dispatchers()
    if group is None and dispatcher is not None and dispatcher not in known_names:  # a mistake though nobody uses it
        raise RecipeError(f"dispatcher = {dispatcher!r} is unknown; {nearest(dispatcher, known_names)}")
    if group is None and dispatcher not in (None, "local"):
        warnings.warn(f"dispatcher {dispatcher!r} is not used: the expert-parallel group has one rank", stacklevel=2)
    known = {"hidden_size": hidden_size, "top_k": top_k, "dtype": dtype}
    settings = {
        "name": "local" if group is None else dispatcher or "all2all",
        "num_experts": n_routed_experts,
        "max_tokens": max_tokens,
        "capacity_factor": capacity_factor,
        "num_sms": num_sms,
        "kernels": kernels,
        "options": tuple(sorted((options or {}).items())),
        **{name: value for name, value in known.items() if value is not None},
    }
    return XTunerDispatcher(settings, group)


def _refuse_split_experts(
    tp_group: dist.ProcessGroup | None, ep_group: dist.ProcessGroup | None, ep_tp_group: dist.ProcessGroup | None
) -> None:
    ep_size = 1 if ep_group is None else ep_group.size()
    sizes = {"tp_group": (tp_group, 1), "ep_tp_group": (ep_tp_group, ep_size)}
    for name, (group, served) in sizes.items():
        if group is not None and group.size() > served:
            raise RecipeError(
                f"{name} of {group.size()} ranks is not served: experts are not split; use expert_tp_size = 1"
            )
