"""Weights to and from the safetensors layout of `transformers`' Qwen3MoeForCausalLM.

Inside, an expert's gate and up projections are one matrix (gate half first) and a rank's experts one tensor; they are
cut apart at export and joined at import only. Both directions are strict: a name that is missing or surplus is an error
that lists it (a lenient reader leaves random weights behind, see the review of allenai/OLMo-core#751).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_ep.config import MoEConfig
from moe_ep.errors import CheckpointError
from moe_ep.schema import require

from .hf_config import INDEX, SINGLE, config_to_hf, read_hf_config
from .hf_layout import FUSED, expected_names, expert_place, fused_place, named_tensors, tied_names
from .model import Decoder
from .model_config import ModelConfig


def import_hf(model: Decoder, folder: str | Path) -> None:
    """Fill the model, sharded by FSDP or not, from a folder that `save_pretrained` wrote.

    Each rank reads its own experts only. Experts may lie one by one (what transformers 4 and 5 write) or fused per
    layer as `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I]. The router stays float32.

    Raises:
        CheckpointError: a name is missing or surplus, a shape differs, `config.json` describes another model, or a file
            is missing or damaged.
    """
    folder = Path(folder)
    _check_same_model(model, folder)
    files = _files_of_names(folder)
    _check_names(files, model.config)
    if model.config.tie_embeddings and "lm_head.weight" in files:
        _check_tied(files)
    staged: list[tuple[DTensor, Tensor]] = []
    with torch.no_grad():
        for name, target in named_tensors(model, lambda parameter: _writable(parameter, staged)):
            _copy(name, target, files, *fused_place(name, model))
        for parameter, whole in staged:
            mesh, placements = parameter.device_mesh, parameter.placements
            # every rank has read the same values: each takes its part, without a collective
            parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def export_hf(
    model: Decoder,
    folder: str | Path,
    *,
    max_positions: int,
    dtype: torch.dtype | None = None,
    router_dtype: torch.dtype = torch.float32,
    writer: bool = True,
) -> None:
    """Write config.json and weights; a collective call on every rank of the model, sharded by FSDP or not.

    With R expert-parallel ranks there are R files: each rank writes its experts, the first one the rest and the index.
    Wait for all ranks before reading. Files are written beside their place and renamed.

    Args:
        model: what to write.
        folder: made where missing; one that holds other weights is refused.
        max_positions: `max_position_embeddings` of config.json, the longest sequence the model was trained for.
        dtype: of the weights; None: the model's.
        router_dtype: of the routers' weights, which decide the top-k.
        writer: False on ranks that hold a copy of another rank's experts (they take part, but write nothing).

    Raises:
        RecipeError: the architecture cannot hold this model.
        CheckpointError: a file cannot be written, or the folder holds other weights.
    """
    folder = Path(folder)
    check_exportable(model.moe_config)
    dtype = dtype or model.config.torch_dtype
    rank, ranks = expert_place(model)
    names = [_file_name(r, ranks) for r in range(ranks)]
    if writer:
        _prepare(folder, [*names, INDEX] if ranks > 1 else names)
    tensors = {}
    for name, tensor in named_tensors(model, _gathered):
        wanted = router_dtype if name.endswith("mlp.gate.weight") else dtype
        if writer and (rank == 0 or ".experts." in name):
            tensors[name] = tensor.to(wanted).contiguous().clone()
    if writer:
        _write(folder / names[rank], lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    if writer and rank == 0:
        _write_json(folder / "config.json", config_to_hf(model.config, model.moe_config, max_positions, dtype))
        if ranks > 1:
            _write_json(folder / INDEX, _index(model, tensors, names))


def check_exportable(moe: MoEConfig) -> None:
    """Refuse what Qwen3MoeForCausalLM cannot compute.

    Raises:
        RecipeError: one sentence that names the key.
    """
    tail = "Qwen3MoeForCausalLM cannot hold it; keep such a model in this program's own checkpoints"
    require(moe.router == "softmax", f"export with router = {moe.router!r} is refused: {tail}")
    require(not moe.num_shared_experts, f"export with num_shared_experts = {moe.num_shared_experts} is refused: {tail}")
    require(moe.routed_scale == 1, f"export with routed_scale = {moe.routed_scale} is refused: {tail}")
    require(not moe.force_balance, f"export with force_balance = true is refused: {tail}")


def _writable(parameter: Tensor, staged: list[tuple[DTensor, Tensor]]) -> Tensor:
    """The parameter, or a whole copy of a sharded one, noted in `staged`."""
    if not isinstance(parameter, DTensor):
        return parameter
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    staged.append((parameter, whole))
    return whole


def _gathered(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().cpu()


def _copy(name: str, target: Tensor, files: dict[str, Path], fused: str, place: Any) -> None:
    source = _read(files[name], name) if name in files else _read(files[fused], fused, place)
    if source.shape != target.shape:
        raise CheckpointError(
            f"{name} is {list(source.shape)} in the file, {list(target.shape)} in the model; config.json is another's"
        )
    target.copy_(source)


def _read(path: Path, name: str, place: Any = None) -> Tensor:
    try:
        with safe_open(str(path), "pt") as file:
            return file.get_tensor(name) if place is None else file.get_slice(name)[place]
    except (OSError, SafetensorError) as err:
        raise CheckpointError(f"{path} cannot be read: {err}; copy it again") from err


def _files_of_names(folder: Path) -> dict[str, Path]:
    """Which file holds which name, as the files themselves say."""
    index, single = folder / INDEX, folder / SINGLE
    if index.exists() and single.exists():
        raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is stale")
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif single.exists():
        names = [SINGLE]
    else:
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; name a folder of save_pretrained")
    found: dict[str, Path] = {}
    for path in (folder / name for name in names):
        try:
            with safe_open(str(path), "pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as err:
            raise CheckpointError(f"{path} cannot be read: {err}; copy it again") from err
    return found


def _check_names(files: dict[str, Path], config: ModelConfig) -> None:
    fused = any(name.endswith(f".experts.{p}") for name in files for p in FUSED)
    expected = expected_names(config, fused=fused)
    missing, surplus = expected - files.keys(), files.keys() - expected - tied_names(config)
    if missing or surplus:
        lists = [f"{what}: {', '.join(sorted(n))}" for what, n in (("missing", missing), ("surplus", surplus)) if n]
        raise CheckpointError(f"the weights do not fit the model ({'; '.join(lists)}); nothing was loaded")


def _check_tied(files: dict[str, Path]) -> None:
    names = ("lm_head.weight", "model.embed_tokens.weight")
    head, embedding = (_read(files[name], name) for name in names)
    if not torch.equal(head, embedding):
        raise CheckpointError(f"{files[names[0]]}: lm_head.weight differs from the embedding it is tied to")


def _check_same_model(model: Decoder, folder: Path) -> None:
    theirs, normalize = read_hf_config(folder)
    ours = model.config
    pairs = {f: (getattr(theirs, f), getattr(ours, f)) for f in ours.__slots__ if f not in ("dtype", "init_std")}
    pairs["normalize_weights"] = (normalize, model.moe_config.normalize_weights)
    if ours.first_dense_layers == 0:
        pairs.pop("intermediate_size")  # of no layer
    different = [f"{name} = {a} (recipe: {b})" for name, (a, b) in pairs.items() if a != b]
    if different:
        listed = ", ".join(different)
        raise CheckpointError(f"{folder / 'config.json'} describes another model: {listed}; change the recipe")
    check_exportable(model.moe_config)


def _file_name(rank: int, ranks: int) -> str:
    return SINGLE if ranks == 1 else f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def _prepare(folder: Path, own: list[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {p.name for p in folder.iterdir() if p.name == INDEX or p.suffix == ".safetensors"}
    except OSError as err:
        raise CheckpointError(f"{folder} cannot be made: {err.strerror}; choose another folder") from err
    if others := sorted(present - set(own)):
        raise CheckpointError(f"{folder} holds other weights ({', '.join(others)}); choose another folder")


def _index(model: Decoder, tensors: dict[str, Tensor], names: list[str]) -> dict[str, Any]:
    """The index of all ranks' files, which the first rank can tell from its own: all hold equally many experts."""
    num_local = model.config.num_experts // len(names)
    mapping = {}
    for name in sorted(expected_names(model.config, fused=False)):
        expert = int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else 0
        mapping[name] = names[expert // num_local]
    sizes = {n: t.numel() * t.element_size() for n, t in tensors.items()}
    experts = sum(size for n, size in sizes.items() if ".experts." in n)
    total = sum(sizes.values()) + experts * (len(names) - 1)
    return {"metadata": {"total_size": total}, "weight_map": mapping}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, lambda beside: Path(beside).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(path: Path, save: Callable[[str], Any]) -> None:
    beside = path.with_name(path.name + ".partial")
    try:
        save(str(beside))
        beside.chmod(0o666 & ~_umask())  # safetensors' own files are readable by nobody else
        os.replace(beside, path)
    except (OSError, SafetensorError) as err:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {err}; free space or choose another folder") from err
