"""The sections of a recipe as typed, frozen values; each refuses what it alone can see to be impossible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_ep.bounds import NOT_NEGATIVE, POSITIVE, Range, check_ranges
from moe_ep.config import AuxLevel, Kernels, RouterName, Weighting
from moe_ep.config_checks import MAX_MICRO_BATCHES
from moe_ep.schema import require

_NAME_BYTES = 200  # file systems allow 255, and an earlier run of the name gets a suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """`dir`/`name` is the run's folder; a relative `dir` starts at the working directory."""

    name: str
    dir: str = "runs"

    def __post_init__(self) -> None:
        require(
            self.name not in ("", ".", "..") and self.name.isprintable() and not set(self.name) & set("/\\"),
            f"name = {self.name!r} must be one folder name: letters, digits and other printable characters, no slash",
        )
        size = len(self.name.encode())
        require(size <= _NAME_BYTES, f"name has {size} bytes, and a folder's name at most {_NAME_BYTES}; shorten it")
        require(self.dir != "", "dir = '' must name a folder; '.' is the working directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESection:
    """How tokens are routed and travel; see `moe_ep.config.MoEConfig`, for tables `[moe.NAME]` `recipes.options`."""

    dispatcher: str = "all2all"
    experts: str = "torch"
    weighting: Weighting = "output"
    router: RouterName = "softmax"
    normalize_weights: bool = True
    routed_scale: float = 1.0
    num_groups: int = 0
    aux_loss: AuxLevel = "batch"
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    force_balance: bool = False
    kernels: Kernels = "auto"
    capacity_factor: float | None = None
    num_sms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """`ep_size` ranks share a set of experts. backend: "gloo" is the CPU, "nccl" CUDA, "auto" CUDA where it is."""

    ep_size: int = 1
    backend: Literal["auto", "gloo", "nccl"] = "auto"

    def __post_init__(self) -> None:
        require(self.ep_size >= 1, f"ep_size must be at least 1, got {self.ep_size}")


_WEEK_S = 604800
_TRAIN_RANGES = {
    "lr": POSITIVE,
    "min_lr": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "clip_norm": Range(above=0, why="(a large one clips nothing)"),
    "timeout_s": Range(at_least=1, at_most=_WEEK_S, why="(seconds)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """One optimizer step sees world size x gradient_accumulation x micro_batch_size sequences.

    `intra_layer_micro_batch` of the gradient_accumulation micro-batches go through each layer together, so that one's
    communication hides behind the others' computation; results do not depend on it, the memory of activations does.

    The rate rises linearly over `warmup_steps` to `lr`, then falls along a cosine to `min_lr` at `steps`. `timeout_s`
    bounds every wait for another rank, in seconds.
    """

    steps: int
    micro_batch_size: int
    sequence_length: int
    gradient_accumulation: int = 1
    intra_layer_micro_batch: int = 1
    lr: float = 3e-4
    warmup_steps: int = 0
    min_lr: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    recompute: Literal["none", "moe", "layer"] = "none"
    timeout_s: float = 60.0
    deterministic: bool = False

    def __post_init__(self) -> None:
        counts = ("steps", "micro_batch_size", "sequence_length", "gradient_accumulation", "intra_layer_micro_batch")
        for name in counts:
            fewest = "interleaves none" if name == "intra_layer_micro_batch" else "is the fewest"
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}; 1 {fewest}")
        check_ranges(self, _TRAIN_RANGES)
        require(
            self.warmup_steps <= self.steps,
            f"warmup_steps = {self.warmup_steps} must be at most steps = {self.steps}: the rate would never reach lr; "
            "lower it (0: no warm-up) or raise steps",
        )
        require(self.min_lr <= self.lr, f"min_lr = {self.min_lr} must be at most lr = {self.lr}: the rate falls to it")
        require(0 <= self.seed < 2**63, f"seed must lie in [0, 2^63), got {self.seed}")
        self._check_micro_batches()

    def _check_micro_batches(self) -> None:
        grouped, accumulated = self.intra_layer_micro_batch, self.gradient_accumulation
        require(
            accumulated % grouped == 0,
            f"intra_layer_micro_batch = {grouped} must divide gradient_accumulation = {accumulated}: it counts "
            f"micro-batches that run together; choose {_divisors(accumulated)}, or a multiple of {grouped} for "
            "gradient_accumulation",
        )


def _divisors(number: int) -> str:
    return " or ".join(str(d) for d in range(1, min(number, MAX_MICRO_BATCHES) + 1) if number % d == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """`path`: a folder or file of text; unset: the sources of Python's standard library. Held out: `valid_fraction`."""

    path: str | None = None
    valid_fraction: float = 0.01

    def __post_init__(self) -> None:
        check_ranges(self, {"valid_fraction": Range(above=0, below=1)})
        require(self.path != "", "path = '' must name a folder or file of text; '.' is the working directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Save every `every` steps (0: only at the end and on SIGTERM) and keep the newest `keep` checkpoints.

    resume: "auto" takes the newest checkpoint of the run's folder, "never" starts anew (an earlier run of this name is
    renamed), a path names a checkpoint. It must be of the same model, routing, text, split, order and sequence length
    (`recipes.identity`); rate, losses, steps, dispatcher, number of ranks and measurements may change.
    """

    every: int = 0
    keep: int = 2
    resume: str = "auto"

    def __post_init__(self) -> None:
        require(self.every >= 0, f"every must not be negative, got {self.every}")
        require(self.keep >= 1, f"keep must be at least 1, got {self.keep}")
        require(self.resume != "", "resume = '' must be 'auto', 'never' or a path")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    """Log every `every` steps, validate every `valid_every` (0: only at the end), trace steps a..b (`trace_steps`).

    `routing_trace` names a folder for the routing of every step (`recipes.routing_trace`): 8 bytes a route.
    """

    every: int = 10
    valid_every: int = 0
    trace_steps: tuple[int, ...] | None = None
    routing_trace: str | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"every must be at least 1, got {self.every}")
        require(self.valid_every >= 0, f"valid_every must not be negative, got {self.valid_every}")
        require(self.routing_trace != "", "routing_trace = '' must name a folder; '.' is the working directory")
        steps = self.trace_steps
        integers = steps is None or all(type(step) is int for step in steps)
        require(
            steps is None or (integers and len(steps) == 2 and 1 <= steps[0] <= steps[1]),
            f"trace_steps = {list(steps or ())} must be two step numbers [first, last], 1 <= first <= last",
        )
