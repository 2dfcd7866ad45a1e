"""What tests of Megatron-Core on GPUs run on each rank, of two or of one; imports nothing of Megatron by itself."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep import MoEError
from moe_ep.testing.ranks import RankPool
from tests.ranks import megatron_cpu

SIZES: dict[str, Any] = dict(
    hidden_size=256, num_attention_heads=4, ffn_hidden_size=256, moe_ffn_hidden_size=128, num_moe_experts=8,
    use_cpu_initialization=False,
)  # fmt: skip
TOP_K = 4


def engine() -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed (moe-ep[te])")


def model_of(ours: str | None, grouped: bool = False, replica: dict[str, Any] | None = None, **changes: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moe_ep.integrations.megatron import use_moe_ep

    model_parallel_cuda_manual_seed(1)
    changes = {**SIZES, "moe_grouped_gemm": grouped, **changes}
    config = megatron_cpu.small_config(**changes)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=grouped, normalization=config.normalization)
    if ours is not None:
        spec = use_moe_ep(spec, dispatcher=ours, max_tokens=256, replica=replica)
    model = megatron_cpu.small_gpt(config, spec)
    return model.to("cuda", config.params_dtype)


def losses(model: Any, rank: int, step: int, sequences: int = 4) -> Any:
    batch = [t.cuda() for t in megatron_cpu.batch(rank, step, sequences=sequences)]
    return model(*batch[:3], labels=batch[3])


def trained(group: Any, rank: int, ours: str | None, steps: int, kind: str = "float32") -> Any:
    """Calls of each class of dispatcher; loss and all gradient norms of each step. Experts one after the other.

    kind: "float32"; "bfloat16", with K = 4; "reference": float32, from the values that the bfloat16 run starts from.
    """
    half = dict(bf16=True, params_dtype=torch.bfloat16)
    more = {} if kind == "float32" else dict(moe_router_topk=TOP_K)
    torch.use_deterministic_algorithms(True)
    try:
        with megatron_cpu.parallel(dist.get_world_size()):
            model, history = model_of(ours, **more, **(half if kind == "bfloat16" else {})), []
            if kind == "reference":
                with torch.no_grad():
                    for own, rounded in zip(
                        model.parameters(), model_of(ours, **more, **half).parameters(), strict=True
                    ):
                        own.copy_(rounded)
            calls = count_calls([layer.mlp.token_dispatcher for layer in model.decoder.layers])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(steps):
                optimizer.zero_grad(set_to_none=True)
                loss = losses(model, rank, step % 4).float().mean()  # four batches, which can be learned
                loss.backward()
                history.append([loss.item(), *(p.grad.double().norm().item() for p in model.parameters())])
                optimizer.step()
            return dict(calls), history
    finally:
        torch.use_deterministic_algorithms(False)


def count_calls(dispatchers: list[Any]) -> collections.Counter[str]:
    """Launches of dispatches from now on, by the dispatchers' class."""
    calls = collections.Counter[str]()

    def counting(dispatcher: Any) -> Any:
        launch = dispatcher.token_dispatch

        def token_dispatch(*args: Any) -> Any:
            calls[type(dispatcher).__name__] += 1
            return launch(*args)

        return token_dispatch

    for dispatcher in dispatchers:
        dispatcher.token_dispatch = counting(dispatcher)
    return calls


def one_layer(group: Any, rank: int, ours: str | None, changes: dict[str, Any]) -> Any:
    changes = dict(bf16=True, params_dtype=torch.bfloat16, moe_router_topk=TOP_K, **changes)
    with megatron_cpu.parallel(dist.get_world_size()):
        try:
            layer = model_of(ours, grouped=True, **changes).decoder.layers[0].mlp
        except MoEError as err:
            return str(err)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(48, 2, 256, generator=generator).cuda().bfloat16().requires_grad_()
        y = layer(x)[0]
        y.backward(torch.randn(y.shape, generator=generator).cuda().bfloat16())
        grads = [x.grad, *(p.grad for p in layer.parameters())]
        return [t.detach().float().cpu() for t in (y, *grads)]


def interleaved(group: Any, rank: int, name: str) -> Any:
    from moe_ep.integrations.megatron import use_domino

    changes = dict(bf16=True, params_dtype=torch.bfloat16)
    with megatron_cpu.parallel(dist.get_world_size()):
        outputs: list[Any] = []

        def note(_: Any, __: Any, out: Any) -> None:
            outputs.append(out.detach().float().cpu())

        try:
            serial, together = (model_of(name, grouped=True, **changes) for _ in range(2))
        except MoEError as err:
            return str(err)
        use_domino(together, 2)
        tokens, positions, mask, labels = [t.cuda() for t in megatron_cpu.batch(rank, 0, sequences=4)]
        for model in (serial, together):
            model.decoder.register_forward_hook(note)
        for half in (slice(0, 2), slice(2, 4)):
            serial(tokens[half], positions[half], mask, labels=labels[half]).sum().backward()
        together(tokens, positions, mask, labels=labels).sum().backward()
        grads = [[p.grad.float().cpu() for p in model.parameters()] for model in (serial, together)]
        return torch.cat(outputs[:2], dim=1), outputs[2], *grads


def in_fp8(group: Any, rank: int, ours: str | None, fp8: bool) -> dict[str, torch.Tensor] | str:
    """Output and gradients of one layer of grouped experts whose GEMMs are fp8 (Megatron's context) or bfloat16."""
    from megatron.core.fp8_utils import get_fp8_context

    if torch.cuda.get_device_capability() < (8, 9):
        return "fp8 needs a GPU of compute capability 8.9"

    changes = dict(bf16=True, params_dtype=torch.bfloat16, moe_router_topk=TOP_K, fp8="hybrid", fp8_recipe="tensorwise")
    with megatron_cpu.parallel(dist.get_world_size()):
        layer = model_of(ours, grouped=True, **changes).decoder.layers[0].mlp
        generator = torch.Generator().manual_seed(rank)
        x, dy = (torch.randn(48, 2, SIZES["hidden_size"], generator=generator).cuda().bfloat16() for _ in range(2))
        x.requires_grad_()
        with get_fp8_context(layer.config, 0) if fp8 else contextlib.nullcontext():
            y = layer(x)[0]
        y.backward(dy)
        found = {"y": y, "dx": x.grad, **{name: p.grad for name, p in layer.experts.named_parameters()}}
        return {name: t.detach().float().cpu() for name, t in found.items() if t is not None}


def check_fp8(pool: RankPool) -> None:
    """Ours in fp8 against Megatron's in fp8, and that against bfloat16 on the same weights.

    Both sides hand the experts the same rows in the same order, forward and backward, and Transformer Engine scales
    each expert's rows by their largest value: so the quantised numbers, the products and each expert's rows of output
    are the same, and fp8 adds nothing to what differs. That is what it is in bfloat16: y and dx are sums of K such
    rows, at most K - 1 additions and a rounding, each by eps / 2 of a partial sum, on either side: eps K. A weight's
    gradient comes from the same factors; it may be added up in float32 in another order and is rounded once: eps.

    Were the GEMMs not in fp8, the two would be that close, too. So fp8 has to show: e4m3 has 3 bits behind the point
    and rounds a factor by up to 2^-4, 2^-4 / sqrt(3) / 1.4 or 2.6 % in the mean square; two factors a product and two
    products behind each other make some 5 to 8 % of y, where bfloat16 (7 bits) makes a sixteenth, 0.4 %.
    """
    eps = 2.0**-7
    plain, native, ours = (pool.run(in_fp8, *case) for case in ((None, False), (None, True), ("all2all", True)))
    if isinstance(plain[0], str):
        pytest.skip(plain[0])

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    for bf16, want, got in zip(plain, native, ours, strict=True):
        assert want.keys() == got.keys() and len(want) > 2
        assert 2**-6 < apart(want["y"], bf16["y"]) < 2**-2
        for name, value in want.items():
            assert apart(got[name], value) <= (eps * TOP_K if name in ("y", "dx") else eps), name


def recomputed(group: Any, rank: int) -> Any:
    from moe_ep.integrations.megatron import use_domino

    whole = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    torch.use_deterministic_algorithms(True)
    try:
        with megatron_cpu.parallel(dist.get_world_size()):
            found = []
            for changes in ({}, dict(attention_dropout=0.3), dict(whole, attention_dropout=0.3)):
                model = use_domino(model_of("all2all", **changes), 2)
                losses(model, rank, 0).sum().backward()
                found.append([p.grad.cpu() for p in model.parameters()])
            return found
    finally:
        torch.use_deterministic_algorithms(False)
