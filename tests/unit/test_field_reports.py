"""What people reported about other software of this kind, tried on one rank. docs/field_reports.md lists it all."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_ep import CheckpointError, MoEConfig, MoEError, MoELayer, RecipeError, Unavailable, moe_layers
from moe_ep.consistency import check_copies, digest
from moe_ep.router import build_router
from recipes.build import build
from recipes.hf import export_hf, import_hf
from recipes.metrics import StepSums
from recipes.model import Decoder
from recipes.model_config import ModelConfig
from recipes.parallel import expert_names, recompute
from recipes.ranks import Ranks
from recipes.recipe import load_recipe, to_toml
from recipes.train_loop import Trainer, fetch, forward_backward
from tests.ranks.small_recipe import write

SIZES: dict[str, Any] = dict(hidden_size=16, expert_intermediate_size=8, num_experts=8, top_k=2)
MODEL = ModelConfig(
    vocab_size=257, num_layers=2, num_attention_heads=2, num_kv_heads=1, head_dim=8, init_std=0.3, **SIZES
)


def trainer(folder: Path, *overrides: str) -> Trainer:
    fixed = [f"data.path={folder / 'text'}", f"run.dir={folder}", "parallel.ep_size=1"]
    return build(load_recipe(write(folder), [*fixed, *overrides]), Ranks(0, 1, 1, torch.device("cpu")))


def gradients_and_sums(run: Trainer) -> tuple[list[torch.Tensor], StepSums]:
    sums = forward_backward(run, fetch(run))
    return run.optimizer.gradients(), sums


# ---- losses, counters, recompute in the program ----


@pytest.mark.parametrize("mode", ["none", "moe", "layer"])
def test_recompute_runs_every_router_twice_and_changes_no_figure(tmp_path: Path, mode: str) -> None:
    """Tencent-Hunyuan/UniRL#140, AI-Hypercomputer/maxtext#4005: a setting that matches nothing; NVIDIA-NeMo/Automodel
    #3247, AI-Hypercomputer/maxtext#1483: figures that count the second pass."""
    plain, run = trainer(tmp_path), trainer(tmp_path, f"train.recompute={mode}")
    calls: Counter[int] = Counter()
    for layer in run.moe:
        layer.router.register_forward_hook(lambda *_, index=layer.layer_index: calls.update([index]))
    expected, sums = gradients_and_sums(plain)
    grads, again = gradients_and_sums(run)
    passes = (1 if mode == "none" else 2) * run.recipe.train.gradient_accumulation
    assert calls == {0: passes, 1: passes}
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert (again.loss, again.aux_loss, again.z_loss) == (sums.loss, sums.aux_loss, sums.z_loss)
    assert torch.equal(again.load, sums.load)
    for layer, other in zip(run.moe, plain.moe, strict=True):
        assert torch.equal(layer.router.load_E, other.router.load_E) and layer.router.load_E.sum() > 0


def test_recompute_that_matches_no_module_is_refused() -> None:
    """Tencent-Hunyuan/UniRL#140: also where a model is built without the recipe's own check."""
    dense = ModelConfig(
        **{name: getattr(MODEL, name) for name in MODEL.__dataclass_fields__}
        | {"first_dense_layers": 2, "intermediate_size": 8}
    )
    with pytest.raises(RecipeError, match=r"train.recompute = 'moe' matched no module of this model"):
        recompute(Decoder(dense, dense.moe()), "moe", lambda: None)


def test_figures_do_not_depend_on_accumulation_nor_on_coefficients(tmp_path: Path) -> None:
    """mlfoundations/open_lm#255, NVIDIA/Megatron-LM#1585: the language loss holds no balancing loss, and neither is
    divided once too often or too seldom by the number of micro-batches."""
    level = "moe.aux_loss=sequence"
    one = trainer(tmp_path, level, "train.gradient_accumulation=1", "train.micro_batch_size=4")
    four = trainer(tmp_path, level, "train.gradient_accumulation=4", "train.micro_batch_size=1")
    strong = trainer(tmp_path, level, "train.gradient_accumulation=4", "moe.aux_loss_coef=5.0", "moe.z_loss_coef=5.0")
    (grads, sums), (others, again), (_, large) = map(gradients_and_sums, (one, four, strong))
    for name in ("loss", "aux_loss", "z_loss"):
        assert getattr(again, name) == pytest.approx(getattr(sums, name), rel=1e-6)
        assert getattr(large, name) == pytest.approx(getattr(sums, name), rel=1e-6)
    assert sums.aux_loss > 0 and torch.equal(sums.load, again.load)
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-7)


def test_balancing_losses_that_nobody_asked_for_are_off_and_printed_so(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#5694, verl-project/verl#4103: no coefficient comes from anywhere but the recipe."""
    path = write(tmp_path)
    path.write_text(path.read_text().replace("aux_loss_coef = 0.01\n", "").replace("z_loss_coef = 0.001\n", ""))
    recipe = load_recipe(path)
    assert "aux_loss_coef = 0.0\nz_loss_coef = 0.0\n" in to_toml(recipe)
    assert recipe.moe_config().aux_loss_coef == recipe.moe_config().z_loss_coef == 0
    assert load_recipe(path, ["moe.aux_loss_coef=1e-3"]).moe_config().aux_loss_coef == 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("experts", ["torch", "loop"])
def test_a_layer_computes_in_its_own_dtype_under_autocast(experts: str, dtype: str) -> None:
    """ROCm/aiter#323, deepspeedai/DeepSpeed#7747: what a wrapper lowers although it was meant to stay."""
    changes = dict(dtype=dtype, experts=experts, num_shared_experts=1, shared_intermediate_size=8)
    layer = MoELayer(MoEConfig(**SIZES, **changes, shared_expert_gate=True, z_loss_coef=0.1))
    results = []
    for enabled in (False, True):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            y, aux = layer(x)
        assert y.dtype == x.dtype
        grads = torch.autograd.grad(y.float().square().sum() + aux.loss, [x, *layer.parameters()])
        results.append((y, aux.loss, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- configuration ----


@pytest.mark.parametrize("name", ["local", "all2all", "agrs"])
def test_the_dispatcher_asked_for_is_the_one_that_runs(tmp_path: Path, name: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#2288, NVIDIA-NeMo/Megatron-Bridge#2861, NVIDIA-NeMo/Automodel#2630."""
    run = trainer(tmp_path, f"moe.dispatcher={name}")
    assert {layer.dispatcher.name for layer in run.moe} == {name}
    assert all(layer.dispatcher.describe().startswith(name) for layer in run.moe)
    assert all(f"dispatcher={name} (1 rank, 4 experts on each)" in repr(layer) for layer in run.moe)


@pytest.mark.parametrize("name", ["None", "", "alltoall", "al2all", "deepep", "nccl_ep"])
def test_another_dispatcher_is_never_taken_instead(tmp_path: Path, name: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#2288: none is not a default; pytorch/torchtitan#2511: nor is what cannot run here."""
    with pytest.raises((RecipeError, Unavailable), match=repr(name)):
        trainer(tmp_path, f'moe.dispatcher="{name}"')


@pytest.mark.parametrize("num_experts", [2, 4])
def test_experts_fewer_than_a_batch_and_all_chosen(num_experts: int) -> None:
    """deepspeedai/DeepSpeed#8155: two tokens, K = E: there is no capacity that could be larger than the tokens."""
    layer = MoELayer(MoEConfig(**(SIZES | dict(num_experts=num_experts, top_k=num_experts))))
    y, aux = layer(torch.randn(2, 16))
    assert y.shape == (2, 16) and aux.load.tolist() == [2] * num_experts


# ---- weights from elsewhere ----


def decoder(seed: int) -> Decoder:
    model = Decoder(MODEL, MODEL.moe())
    model.reset_parameters(seed)
    return model


def test_moe_layers_are_found_and_filled_inside_wrappers(tmp_path: Path) -> None:
    """mlc-ai/pith-train#89: a finder that returns nothing, so that what it should have found keeps other weights."""
    source, target = decoder(1), decoder(2)
    export_hf(source, tmp_path, max_positions=16)
    wrapped = torch.compile(nn.ModuleDict({"inner": nn.Sequential(target)}))
    assert [layer.layer_index for layer in moe_layers(wrapped)] == [0, 1]
    compiled = torch.compile(target)
    assert expert_names(compiled) == {n for n, _ in target.named_parameters() if ".experts." in n} != set()
    import_hf(compiled, tmp_path)
    for (name, value), wanted in zip(target.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize("place", ["mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"])
def test_a_selection_bias_that_the_layout_has_no_place_for_is_an_error(tmp_path: Path, place: str) -> None:
    """deepspeedai/DeepSpeed#8358, deepspeedai/DeepSpeed#8369: it is dropped in silence where it is a buffer."""
    safetensors = pytest.importorskip("safetensors.torch")
    export_hf(decoder(1), tmp_path, max_positions=16)
    file = tmp_path / "model.safetensors"
    weights = safetensors.load_file(file)
    safetensors.save_file(weights | {f"model.layers.1.{place}": torch.ones(8)}, file)
    with pytest.raises(CheckpointError, match=f"surplus: model.layers.1.{place}"):
        import_hf(decoder(2), tmp_path)


FAMILIES = {
    "deepseek_v3": ("modeling_deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config"),
    "glm4_moe": ("modeling_glm4_moe", "Glm4MoeTopkRouter", "Glm4MoeConfig"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_biased_router_chooses_what_transformers_chooses(family: str) -> None:
    """deepspeedai/DeepSpeed#8358: with a bias that matters, on 256 tokens, one group of experts."""
    module, router_name, config_name = FAMILIES[family]
    theirs_in = pytest.importorskip(f"transformers.models.{family}.{module}")
    names = dict(hidden_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1)
    theirs = getattr(theirs_in, router_name)(
        getattr(theirs_in, config_name)(**names, routed_scaling_factor=2.5, norm_topk_prob=True)
    )
    ours = build_router(MoEConfig(**SIZES, router="sigmoid", routed_scale=2.5, init_std=0.5), 0)
    ours.bias.copy_(torch.linspace(-0.4, 0.4, 8))
    theirs.load_state_dict({"weight": ours.weight.detach(), "e_score_correction_bias": ours.bias})
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    _, weights, ids = theirs(x)
    routing, _ = ours(x)
    order = ids.argsort(1), routing.expert_ids.argsort(1)
    assert torch.equal(ids.gather(1, order[0]), routing.expert_ids.gather(1, order[1]))
    torch.testing.assert_close(weights.gather(1, order[0]), routing.weights.gather(1, order[1]))
    ours.bias.zero_()
    assert not torch.equal(ours(x)[0].expert_ids.sort(1).values, ids.sort(1).values), "the bias decides nothing here"


# ---- copies ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_digest_tells_any_single_element_and_the_order(dtype: torch.dtype) -> None:
    values = torch.arange(24).remainder(5).to(dtype).view(4, 6)
    assert digest(values) == digest(values.clone()) == digest(values.t().contiguous().t())
    for index in range(24):
        other = values.clone()
        other.view(-1)[index] = 1 - values.view(-1)[index].long() % 2
        if not torch.equal(other, values):
            assert digest(other) != digest(values)
    assert digest(values) != digest(values.flip(0)) and digest(values[:0]) == 0
    check_copies([("x", values)], None)


def test_nan_and_signed_zeros_are_bits_too() -> None:
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone()) and digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_errors_are_of_one_family() -> None:
    """Whoever drives a layer catches MoEError, whatever went wrong."""
    with pytest.raises(MoEError):
        MoELayer(MoEConfig(**SIZES))(torch.randn(2, 3, 17))


def marked_for_a_stream(source: str) -> list[int]:
    """Lines that call record_stream."""
    return [n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and n.attr == "record_stream"]


def test_no_tensor_is_marked_for_a_stream() -> None:
    """pytorch/pytorch#147168, sgl-project/sglang#32746: what is marked comes back only when an event is polled."""
    root = Path(__file__).resolve().parents[2]
    sources = [*root.glob("moe_ep/**/*.py"), *root.glob("kernels/**/*.py")]
    assert len(sources) > 40 and marked_for_a_stream("a = 1\nx.record_stream(stream)") == [2]
    assert {str(path): lines for path in sources if (lines := marked_for_a_stream(path.read_text()))} == {}
