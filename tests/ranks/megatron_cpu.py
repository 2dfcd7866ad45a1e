"""Megatron-Core on CPU ranks over gloo, for tests: what of it takes CUDA for granted, put aside, and a tiny GPT.

Megatron-Core is not changed: each name below is replaced in the process of a test's rank, while the test runs there.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NoStream:
    """Stream, event and context that do nothing: on a CPU everything is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class NoTracker:
    """Megatron's CUDA random states: there is one, torch's own."""

    def fork(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, _: dict[str, Any]) -> None:
        pass

    def is_initialized(self) -> bool:
        return True


class OnHost(TorchFunctionMode):
    """What is to be made on device "cuda" is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def to_host(tensor: Tensor, *, as_numpy: bool = False, **_: Any) -> Any:
    """The alltoall dispatcher wants its splits as numpy arrays, which it makes from CUDA tensors only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Everything of Megatron-Core that a tiny GPT needs, on a CPU."""
    import megatron.core.models.gpt  # noqa: F401
    from megatron.core import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

    with contextlib.ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value, create=True))

        put(torch.cuda, "current_device", lambda: torch.device("cpu"))
        for name in ("Stream", "Event", "stream"):
            put(torch.cuda, name, NoStream)
        put(torch.cuda, "current_stream", lambda *_: NoStream())
        put(torch.cuda, "synchronize", lambda *_: None)
        put(token_dispatcher, "maybe_move_tensor_to_cpu", to_host)
        put(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
        put(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks for it though there is no Transformer Engine
            put(moe_utils, "te_general_gemm", None)
        if hasattr(router, "save_to_aux_losses_tracker"):
            put(router, "save_to_aux_losses_tracker", lambda *_, **__: None)
        else:
            put(router, "get_moe_metrics_tracker", NoStream)
        for module in [m for n, m in sorted(sys.modules.items()) if n.startswith("megatron.core")]:
            if hasattr(module, "get_cuda_rng_tracker"):
                put(module, "get_cuda_rng_tracker", NoTracker)
            if hasattr(module, "is_te_min_version"):
                put(module, "is_te_min_version", lambda *_, **__: False)
        put(utils, "is_te_min_version", lambda *_, **__: False)
        stack.enter_context(OnHost())
        yield


@contextlib.contextmanager
def one_tracker() -> Iterator[None]:
    """Inside of `on_cpu`: Megatron's tracker of random states itself, with a CPU's states."""
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(7).get_state()})
    with contextlib.ExitStack() as stack:
        for module in [m for n, m in sorted(sys.modules.items()) if n.startswith("megatron.core")]:
            if hasattr(module, "get_cuda_rng_tracker"):
                stack.enter_context(mock.patch.object(module, "get_cuda_rng_tracker", lambda *_, **__: tracker))
        yield


@contextlib.contextmanager
def logging_to(found: list[tuple[str, int]]) -> Iterator[None]:
    """(name, layer) of each loss that a router logs."""
    from megatron.core.transformer.moe import router

    def note(name: str, _: Any, layer: int | None, *__: Any, **___: Any) -> None:
        if layer is not None:
            found.append((name, layer))

    class Tracker:
        record = staticmethod(lambda name, value=None, layer_number=None, *_, **__: note(name, value, layer_number))

    old = hasattr(router, "save_to_aux_losses_tracker")
    name, value = ("save_to_aux_losses_tracker", note) if old else ("get_moe_metrics_tracker", Tracker)
    with mock.patch.object(router, name, value):
        yield


@contextlib.contextmanager
def parallel(expert_ranks: int, **sizes: int) -> Iterator[None]:
    """Megatron's process groups over all ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_ranks, **sizes)
    try:
        yield
    finally:
        from moe_ep import close_dispatchers

        close_dispatchers(parallel_state.get_expert_model_parallel_group())
        close_dispatchers(None)
        dist.barrier()
        parallel_state.destroy_model_parallel()


def small_config(**changes: Any) -> Any:
    """TransformerConfig of a GPT that takes milliseconds."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = dict(
        num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, moe_ffn_hidden_size=24,
        num_moe_experts=8, moe_router_topk=2, moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall", use_cpu_initialization=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, expert_tensor_parallel_size=1,
        params_dtype=torch.float32,
    )  # fmt: skip
    values.update(expert_model_parallel_size=dist.get_world_size() if dist.is_initialized() else 1)
    return TransformerConfig(**{**values, **changes})


def layer_spec(config: Any) -> Any:
    """Megatron's own spec of its decoder block, without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)


def small_gpt(config: Any, spec: Any, seed: int = 1, **others: Any) -> Any:
    """A GPT whose initial values depend on the seed and, for experts, on the rank."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(seed)
    model = GPTModel(
        config, spec, vocab_size=32, max_sequence_length=16, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, **others,
    )  # fmt: skip
    _spread_experts(model, seed)
    return model


def build(ours: str | None, **changes: Any) -> Any:
    """A small GPT; `ours` names a dispatcher, None: Megatron's alltoall."""
    from moe_ep.integrations.megatron import use_moe_ep

    config = small_config(**changes)
    spec = layer_spec(config)
    return small_gpt(config, spec if ours is None else use_moe_ep(spec, dispatcher=ours, max_tokens=64))


@torch.no_grad()
def _spread_experts(model: Any, seed: int) -> None:
    """Megatron draws experts from a random state of its own, which is put aside: here every rank's differ."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def batch(rank: int, step: int, sequences: int = 2, length: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, position_ids [B, S], the causal mask [1, 1, S, S] (True: hidden), labels [B, S]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 32, (sequences, length + 1), generator=generator)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    return tokens[:, :-1], torch.arange(length).expand(sequences, length), mask, tokens[:, 1:]


def losses(model: Any, rank: int, step: int, **sizes: int) -> Tensor:
    """Loss of each token, float32 [B, S]."""
    tokens, positions, mask, labels = batch(rank, step, **sizes)
    result: Tensor = model(tokens, positions, mask, labels=labels)
    return result


@contextlib.contextmanager
def counted_copies(found: list[int], late: list[bool] | None = None) -> Iterator[None]:
    """Copies on all ranks of each plan that is made, and whether they set off behind the experts' own rows."""
    from moe_ep.integrations.megatron_replicas import ExpertCopies

    real = ExpertCopies.place

    def place(self: Any, lease: Any, routing: Any) -> Any:
        moved = real(self, lease, routing)
        found.append(int(lease.plans[0].num_replicas()))
        if late is not None:
            late.append(lease._replicas is None)
        return moved

    with mock.patch.object(ExpertCopies, "place", place):
        yield


def has_megatron() -> bool:
    """Whether Megatron-Core can be imported here."""
    try:
        importlib.import_module("megatron.core")
    except ImportError:
        return False
    return True
