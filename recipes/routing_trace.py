"""Routing traces: which experts each token of a run chose, one safetensors file a step and rank.

`step-00000012-rank3.safetensors` holds `ids` int32 [layer, micro_batch, T, K] (-1: no route) and `weights` float32
alike, of the MoE layers in the model's order; its header is a `TraceHeader`. `tools/replica_report.py` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_ep.errors import InputError, Unavailable
from moe_ep.layer import MoELayer
from moe_ep.routing import Routing
from recipes.files import writing

_FILE = re.compile(r"step-\d{8}-rank\d+\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Attributes of one file.

    Attributes:
        step, rank: what the file is of; rank counts within the expert-parallel group.
        replica: which of the data-parallel groups of `ranks` ranks it is of.
        ranks, num_experts, top_k, layers, micro_batches: R, E, K and the leading sizes of the tensors.
        expert_bytes: weights of one expert. row_bytes: one row of x.
        seed, commit: of the run; commit is "" where the sources are in no git work tree.
    """

    step: int
    rank: int
    replica: int
    ranks: int
    num_experts: int
    top_k: int
    layers: int
    micro_batches: int
    expert_bytes: int
    row_bytes: int
    seed: int
    commit: str

    @property
    def file_name(self) -> str:
        """Name of the file in the trace's folder."""
        return f"step-{self.step:08d}-rank{self.replica * self.ranks + self.rank}.safetensors"


_FIELDS = tuple(f.name for f in dataclasses.fields(TraceHeader))
_SAME = ("ranks", "num_experts", "top_k", "layers", "micro_batches", "expert_bytes", "row_bytes")


def require_safetensors() -> Any:
    """The module that reads and writes the files.

    Raises:
        Unavailable: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as err:
        raise Unavailable("routing traces need the package safetensors; pip install safetensors") from err
    return safetensors


def write_step(folder: Path, header: TraceHeader, ids: Tensor, weights: Tensor) -> Path:
    """Write one file, whole or not at all.

    Raises:
        RunFolderError: it cannot be written.
    """
    path = folder / header.file_name
    beside = path.with_name(f".{path.name}.partial")
    facts = {name: str(value) for name, value in dataclasses.asdict(header).items()}
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        require_safetensors().torch.save_file({"ids": ids.int(), "weights": weights.float()}, beside, facts)
        os.replace(beside, path)
    return path


class TraceRecorder:
    """Listens to the routers of a model and writes what they chose.

    Args:
        layers: the MoE layers in the model's order.
        folder: where the files go.
        header: its step is filled in at each `write`.
    """

    def __init__(self, layers: Sequence[MoELayer], folder: Path, header: TraceHeader) -> None:
        require_safetensors()
        self.folder, self.header = folder, header
        self._listening = False
        self._heard: list[list[Routing]] = [[] for _ in layers]
        for heard, layer in zip(self._heard, layers, strict=True):
            layer.router.register_forward_hook(self._hook(heard))

    def _hook(self, heard: list[Routing]) -> Any:
        def keep(router: nn.Module, arguments: Any, result: Any) -> None:
            if self._listening:
                heard.append(result[0])

        return keep

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Around the forward of training micro-batches: recompute and evaluation route again, and are not meant."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def write(self, step: int) -> None:
        """Write what was heard since the last time.

        Raises:
            RunFolderError: the file cannot be written.
        """
        rows = [list(heard) for heard in self._heard]
        for heard in self._heard:
            heard.clear()
        assert all(len(layer) == self.header.micro_batches for layer in rows), "a router ran too often or too rarely"
        ids, weights = (
            torch.stack([torch.stack([getattr(r, name).detach() for r in layer]) for layer in rows]).cpu()
            for name in ("expert_ids", "weights")
        )
        write_step(self.folder, dataclasses.replace(self.header, step=step), ids, weights)


def git_commit() -> str:
    """The commit of these sources, or ""."""
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one expert-parallel group: `ids` int32 [layer, micro_batch, T, K] of each rank, T may differ."""

    header: TraceHeader
    ids: list[Tensor]


def read_steps(paths: Iterable[Path]) -> list[Step]:
    """Read traces, by step and expert-parallel group.

    Args:
        paths: files, or folders of files.

    Raises:
        InputError: no file, a file that is no trace, a rank missing, or traces of different sizes.
    """
    groups: dict[tuple[int, int], dict[int, tuple[TraceHeader, Tensor]]] = defaultdict(dict)
    for path in _files(paths):
        header, ids = _read(path)
        ranks = groups[header.step, header.replica]
        if header.rank in ranks:
            raise InputError(f"{path}: step {header.step} of rank {header.rank} is there twice; name one run's trace")
        ranks[header.rank] = header, ids
    return [_join(ranks) for _, ranks in sorted(groups.items())]


def _files(paths: Iterable[Path]) -> list[Path]:
    found = []
    for path in paths:
        files = sorted(p for p in path.iterdir() if _FILE.fullmatch(p.name)) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path} holds no step-*-rank*.safetensors; record one with metrics.routing_trace={path}")
        found += files
    return found


def _read(path: Path) -> tuple[TraceHeader, Tensor]:
    library = require_safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            facts, ids = file.metadata() or {}, file.get_tensor("ids")
        values = {name: facts[name] if name == "commit" else int(facts[name]) for name in _FIELDS}
    except (OSError, KeyError, ValueError, library.SafetensorError) as err:
        raise InputError(f"{path} is no routing trace ({err}); record one with metrics.routing_trace=FOLDER") from err
    header = TraceHeader(**values)  # type: ignore[arg-type]
    sizes = (header.layers, header.micro_batches, header.top_k)
    if ids.dim() != 4 or (*ids.shape[:2], ids.shape[3]) != sizes or (ids.numel() and ids.max() >= header.num_experts):
        raise InputError(f"{path}: ids {tuple(ids.shape)} contradict the header {header}; record the trace again")
    return header, ids


def _join(ranks: dict[int, tuple[TraceHeader, Tensor]]) -> Step:
    header = next(iter(ranks.values()))[0]
    missing = sorted(set(range(header.ranks)) - set(ranks))
    if missing:
        raise InputError(
            f"the trace of step {header.step} lacks rank {missing[0]} of {header.ranks}; name all its files"
        )
    for other, _ in ranks.values():
        differing = [name for name in _SAME if getattr(other, name) != getattr(header, name)]
        if differing:
            raise InputError(f"traces of step {header.step} differ in {differing[0]}; name files of one run")
    return Step(header, [ranks[rank][1] for rank in range(header.ranks)])
