"""A stack of decoder layers to measure: attention (or none), norm, experts; with the benchmark's routing and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_ep.config import MoEConfig, ReplicaConfig
from moe_ep.dispatch import Dispatcher, build_dispatcher
from moe_ep.domino import DominoLayer, DominoStack
from moe_ep.errors import RecipeError
from moe_ep.experts_registry import find_experts
from moe_ep.layer import MoELayer
from moe_ep.replica.build import build_runtime, check_replicas
from moe_ep.replica.runtime import ReplicaRuntime
from moe_ep.schema import require
from recipes.attention import Attention, Rotary

from .bench_candidates import Candidate
from .bench_counts import RowCounts
from .bench_layer import ScriptedRouter
from .bench_setting import Setting
from .bench_tap import TappedComm
from .rows import dtype_name
from .shapes import Shape

VOCAB_SIZE = 256  # bytes
_EPS, _ROPE_THETA = 1e-6, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSize:
    """Causal grouped-query attention in sequences of `length` tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    length: int

    def __str__(self) -> str:
        return f"gqa:{self.num_heads},{self.num_kv_heads},{self.head_dim},{self.length}"


def parse_attention(text: str, shape: Shape) -> AttentionSize | None:
    """Of `--attention`: "none" (norm only), "gqa" (sizes from the shape) or "gqa:HEADS,KV_HEADS,HEAD_DIM,LENGTH".

    Heads of 128 that make up H, one key/value head for eight of them, sequences of 4096 tokens or T where it is less.

    Raises:
        RecipeError: neither, or sizes that do not fit.
    """
    kind, _, sizes = text.partition(":")
    if text == "none":
        return None
    require(kind == "gqa", f"--attention {text!r} is not none, gqa or gqa:HEADS,KV_HEADS,HEAD_DIM,LENGTH")
    if not sizes:
        heads = max(shape.H // 128, 1)
        found = AttentionSize(
            num_heads=heads, num_kv_heads=max(heads // 8, 1), head_dim=min(128, shape.H), length=min(4096, shape.T)
        )
    else:
        parts = sizes.split(",")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise RecipeError(f"--attention {text!r} must be gqa:HEADS,KV_HEADS,HEAD_DIM,LENGTH, four positive numbers")
        found = AttentionSize(**dict(zip(AttentionSize.__slots__, map(int, parts), strict=True)))
    fits = found.num_heads % found.num_kv_heads == 0 and found.head_dim % 2 == 0 and shape.T % found.length == 0
    require(
        fits,
        f"--attention {found} does not fit T = {shape.T}: KV_HEADS must divide HEADS, 2 HEAD_DIM, LENGTH T",
    )
    return found


class BenchDecoderLayer(DominoLayer):
    """Pre-norm attention, norm, experts. Keeps what it saw where it is asked to (`seen`), for the check."""

    def __init__(
        self, moe: MoELayer, attention: AttentionSize | None, rotary: Rotary | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden_size = moe.config.hidden_size
        self.moe: MoELayer = moe
        self.length = 0 if attention is None else attention.length
        if attention is not None and rotary is not None:
            self.input_norm = nn.RMSNorm(hidden_size, eps=_EPS, dtype=dtype)
            heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
            self.attn = Attention(hidden_size, heads, kv_heads, head_dim, _EPS, rotary, dtype)
        self.post_norm = nn.RMSNorm(hidden_size, eps=_EPS, dtype=dtype)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] to (h, n) [T, H]."""
        h = x
        if self.length:
            with _flash(x.device):
                h = x + self.attn(self.input_norm(x).view(-1, self.length, x.shape[-1])).view(x.shape)
        n = self.post_norm(h)
        if self.seen is not None:
            for tensor in (x, h, n):
                if tensor.requires_grad:
                    tensor.retain_grad()
            self.seen.append((x, h, n))
        return h, n


def _flash(device: torch.device) -> AbstractContextManager[Any]:
    """Flash attention or an error; on CPU whatever torch takes."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A micro-batch as one variant cuts it: tokens [T', H], ids and gradients, and which of the drawn ones it holds."""

    x: Tensor
    dy: Tensor
    targets: Tensor
    ids: Tensor
    drawn: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPath:
    """What decides where rows go: a dispatcher, with the tap on its communication, and copies of experts, if any."""

    config: MoEConfig
    dispatcher: Dispatcher
    tap: TappedComm
    replicas: ReplicaRuntime | None


class BenchStack:
    """Layers with weights on the device, shared by all variants and dispatchers of one shape.

    Args:
        setting: `most` routings for each iteration.
        most: the largest M.
        experts, attention, num_layers: of the layers.
    """

    def __init__(
        self, setting: Setting, most: int, experts: str, attention: AttentionSize | None, num_layers: int
    ) -> None:
        self.setting, self.most = setting, most
        self.attention_name = "none" if attention is None else str(attention)
        shape, place, dtype = setting.shape, setting.place, setting.dtype
        self.config = MoEConfig(
            hidden_size=shape.H, expert_intermediate_size=shape.I, num_experts=shape.E, top_k=shape.K,
            dtype=dtype_name(dtype), max_tokens=shape.T, experts=experts, kernels=setting.kernels, aux_loss="none",
            normalize_weights=shape.K > 1, z_loss_coef=0.0 if shape.K > 1 else 1e-3,
        )  # fmt: skip
        build_dispatcher(self.config.dispatch(), place.group)  # which the layers then share
        rotary = None if attention is None else Rotary(attention.head_dim, _ROPE_THETA)
        with torch.device("meta"):
            moes = [MoELayer(self.config, place.group, layer_index=i) for i in range(num_layers)]
            stack = DominoStack(BenchDecoderLayer(moe, attention, rotary, dtype) for moe in moes)
            model = nn.ModuleDict({"stack": stack, "head": nn.Linear(shape.H, VOCAB_SIZE, bias=False, dtype=dtype)})
        self.model = model.to_empty(device=place.device)
        self.stack, self.head = stack, model["head"]
        self.layers: list[BenchDecoderLayer] = list(stack.layers)  # type: ignore[arg-type]
        self._draw()
        self.routers = [ScriptedRouter(layer.moe.router) for layer in self.layers]
        self.counts = RowCounts(place, shape.E)
        for layer, router in zip(self.layers, self.routers, strict=True):
            layer.moe.router = router  # type: ignore[assignment]
            self.counts.watch(layer.moe.experts)
        self._paths: dict[tuple[Candidate, int, int, ReplicaConfig], RowPath] = {}
        # samples of the first variant, by dispatcher, pass and M
        self.gradients: dict[tuple[Any, ...], dict[str, Tensor]] = {}

    def _draw(self) -> None:
        """Matrices normal(0, init_std), other ones on every rank where the experts are; norms 1, inputs normal."""
        setting, shape, device = self.setting, self.setting.shape, self.setting.place.device
        common = torch.Generator(device).manual_seed(setting.workload.seed)
        own = torch.Generator(device).manual_seed(setting.workload.seed * 4096 + setting.place.rank + 1)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                generator = own if ".experts." in name else common
                _ = (
                    parameter.normal_(0, self.config.init_std, generator=generator)
                    if parameter.dim() > 1
                    else (parameter.fill_(1))
                )
        sizes = (self.most, shape.T, shape.H)
        self.xs, self.dys = (torch.randn(sizes, generator=own, device=device).to(setting.dtype) for _ in range(2))
        self.targets = torch.randint(VOCAB_SIZE, (self.most, shape.T), generator=own, device=device)

    def path(self, candidate: Candidate, tokens: int, num: int, replica: ReplicaConfig) -> RowPath:
        """How rows of `num` micro-batches of so many tokens travel.

        Raises:
            RecipeError, PlanError, Unavailable: it cannot run here, on every rank.
        """
        key = (candidate, tokens, num, replica)
        if key not in self._paths:
            sizes: dict[str, Any] = {"dispatcher": candidate.name, "max_tokens": tokens, "num_micro_batches": num}
            config = dataclasses.replace(self.config, **sizes | candidate.values, replica=replica)
            place = self.setting.place
            check_replicas(config, place.group)
            dispatcher = build_dispatcher(config.dispatch(place.num_ranks), place.group)
            runtime = build_runtime(config, dispatcher, find_experts(config.experts))
            tap = TappedComm(dispatcher.comm(place.device))
            dispatcher.comm = lambda device: tap  # type: ignore[method-assign]
            self._paths[key] = RowPath(config=config, dispatcher=dispatcher, tap=tap, replicas=runtime)
        return self._paths[key]

    def use(self, path: RowPath, reserve_sms: int | None) -> None:
        """Have every layer send that way."""
        for layer in self.layers:
            moe = layer.moe
            moe.config, moe.dispatcher, moe.replicas = path.config, path.dispatcher, path.replicas
            moe.reserve_sms = reserve_sms

    def pieces(self, iteration: int, num: int, whole: bool) -> list[Piece]:
        """The first `num` micro-batches of an iteration, one by one or as one."""
        drawn = [iteration * self.most + i for i in range(num)]
        groups = [tuple(range(num))] if whole else [(i,) for i in range(num)]
        return [
            Piece(
                x=_join(self.xs, group), dy=_join(self.dys, group), targets=_join(self.targets, group),
                ids=torch.cat([self.setting.routings[drawn[i]].expert_ids for i in group]),
                drawn=tuple(drawn[i] for i in group),
            )
            for group in groups
        ]  # fmt: skip

    def script(self, pieces: Sequence[Piece]) -> None:
        """Have the routers of all layers choose the pieces' ids, in this order."""
        for router in self.routers:
            router.script = [piece.ids for piece in pieces]

    def loss(self, y_TH: Tensor, piece: Piece, num_tokens: int) -> Tensor:
        """Cross-entropy of byte targets, summed and divided by the tokens of all micro-batches and ranks."""
        logits = self.head(y_TH).float()
        return F.cross_entropy(logits, piece.targets, reduction="sum") / num_tokens

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All of them by name."""
        return self.model.named_parameters()


def _join(tensors: Tensor, group: tuple[int, ...]) -> Tensor:
    return tensors[group[0] : group[-1] + 1].flatten(0, 1)
