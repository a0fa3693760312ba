"""SD3.5: what is known of its models without a network, and its second attention and norms of q and k through training,
levers, precisions and LoRA files."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import lora_readers
import original_layout
import pytest
import torch
from blocks import predict_velocity
from diffusers import SD3Transformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import TrainOnce

from benchmarks.tiny_models import tiny_sd3
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods.lora import Lora
from simpletune.apps.cli.main import main
from simpletune.engine.memory.profiles import with_profile
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.quant.precision import FP32, Int8, Nf4
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared import family_files
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics

CPU = torch.device("cpu")
STEPS, BLOCKS = 2, 3
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
SECOND = [f"transformer_blocks.{block}.attn2.{name}" for block in (0, 1) for name in PROJECTIONS]
LORA = {"adapter": {"method": "lora", "rank": 2}}
BASES: dict[str, dict] = {
    "int8": LORA | {"precision": {"weights": "int8", "compute": "bf16"}},
    "int8 in fp32": LORA | {"precision": {"weights": "int8", "compute": "fp32"}},
    "nf4": LORA | {"precision": {"weights": "nf4", "compute": "bf16"}},
    "full": {
        "adapter": {"method": "full"}, "precision": {"weights": "bf16"}, "optimizer": {"lr": 1e-3},
        "train": {"steps": STEPS, "batch_size": 2, "clip": "per_parameter", "clip_norm": 0.5},
    },
}  # fmt: skip
STREAMED = {"resident_blocks": 1, "offload_checkpoint_inputs": True}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks, the first two with a second attention, as SD3.5 Medium has it in the first 13 of 24."""
    folder = tmp_path_factory.mktemp("sd35") / "pipeline"
    tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, layers=BLOCKS, heads=BLOCKS), seed=1, dtype="fp32")
    config = SD3Transformer2DModel.load_config(folder / "transformer")
    torch.manual_seed(5)
    model = SD3Transformer2DModel.from_config({**config, "qk_norm": "rms_norm", "dual_attention_layers": [0, 1]})
    for name, parameter in model.named_parameters():
        if ".norm_" in name and parameter.dim() == 1:  # ones at the start: a swap of two of them would not show
            parameter.data.uniform_(0.5, 1.5)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture
def run_with(tiny_config: dict, pipeline: Path, train_once: TrainOnce):
    """A few steps of one base with some memory options: the run's folder, only to be read."""

    def run(base: str, memory: dict, name: str = "sd35") -> Path:
        data = copy.deepcopy(tiny_config) | {"train": {"steps": STEPS, "batch_size": 2}} | copy.deepcopy(BASES[base])
        data["model"]["pretrained"] = str(pipeline)
        return train_once(data | {"memory": memory, "name": name})

    return run


def losses_and_weights(run: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    weights = load_file(checkpoint.checkpoint_folder(run, STEPS) / checkpoint.TRAINABLE)
    return [row["loss"] for row in read_metrics(run)], weights


LESS = {"keep_attention": "all", "feed_forward": "alone"}


@pytest.mark.parametrize(("base", "less"), [pytest.param("int8", {}, marks=pytest.mark.slow), ("nf4", LESS)])
def test_streaming_and_checkpointing_change_no_bit(base: str, less: dict, run_with) -> None:
    plain = losses_and_weights(run_with(base, {"checkpointing": "none"}, "plain"))
    assert len(set(plain[0])) == STEPS
    moved = {name for name, value in plain[1].items() if ".attn2." in name and "lora_B" in name and value.any()}
    assert len(moved) == len(SECOND)
    losses, weights = losses_and_weights(run_with(base, STREAMED | less))
    assert losses == plain[0]
    torch.testing.assert_close(weights, plain[1], rtol=0, atol=0)


@pytest.mark.slow
def test_full_streamed_in_backward_changes_no_bit(run_with) -> None:
    plain = losses_and_weights(run_with("full", {}, "plain"))
    losses, weights = losses_and_weights(run_with("full", STREAMED | {"optimizer_in_backward": True}))
    assert losses == plain[0] and len(set(losses)) == STEPS
    torch.testing.assert_close(weights, plain[1], rtol=0, atol=0)


def test_the_plan_with_nine_vectors_a_block_changes_the_last_bits_at_most(run_with) -> None:
    plain, _ = losses_and_weights(run_with("int8 in fp32", {}, "plain"))
    planned, _ = losses_and_weights(run_with("int8 in fp32", STREAMED | {"modulation": "plan", "modulation_window": 2}))
    assert planned == pytest.approx(plain, rel=1e-6) and len(set(plain)) == STEPS


def random_updates(pipeline: Path, layers: list[str] | None = None) -> dict[str, LoraUpdate]:
    """Updates of linear layers, all unless named, large enough to show."""
    generator = torch.Generator().manual_seed(3)
    state = original_layout.state_of(pipeline / "transformer")
    found = {}
    for name in layers or [k.removesuffix(".weight") for k, v in state.items() if v.dim() == 2 and ".weight" in k]:
        o, i = state[f"{name}.weight"].shape
        down, up = torch.randn(2, i, generator=generator), torch.randn(o, 2, generator=generator)
        found[name] = LoraUpdate(down / i**0.5, up / 2**0.5, 0.3)
    return found


def in_original_layout(pipeline: Path, updates: dict[str, LoraUpdate]) -> dict[str, torch.Tensor]:
    """The transformer with W + scale B A, by the definition, under the original names."""
    state = original_layout.state_of(pipeline / "transformer")
    for name, update in updates.items():
        state[f"{name}.weight"] = state[f"{name}.weight"] + update.scale * (update.up @ update.down)
    return original_layout.mmdit(state, BLOCKS)


def all_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_an_exported_run_is_what_other_tools_apply(run_with, pipeline: Path, tmp_path: Path) -> None:
    """diffusers' file, and kohya's and ComfyUI's made from it, by the independent reader."""
    trained = run_with("int8 in fp32", {}, "plain") / "pytorch_lora_weights.safetensors"
    updates = read_lora(trained)
    assert set(SECOND) < set(updates)
    files = {"diffusers": trained}
    for layout in ("kohya", "comfy"):
        files[layout] = tmp_path / f"{layout}.safetensors"
        assert main(["export", str(trained), "--format", layout, "--out", str(files[layout])]) == 0
    original = original_layout.mmdit(original_layout.state_of(pipeline / "transformer"), BLOCKS)
    expected = in_original_layout(pipeline, updates)
    for layout, file in files.items():
        applied, unmatched = lora_readers.apply(original, load_file(file), BLOCKS)
        assert unmatched == [], layout
        all_close(applied, expected)
    assert "lora_unet_joint_blocks_1_x_block_attn2_qkv.lora_up.weight" in load_file(files["kohya"])
    with safe_open(files["kohya"], framework="pt") as handle:
        assert handle.metadata()["modelspec.architecture"] == "stable-diffusion-3-5-medium/lora"
        assert handle.metadata()["ss_base_model_version"] == "sd3_5-medium"


def test_diffusers_applies_an_exported_file_to_the_second_attention(pipeline: Path, tmp_path: Path) -> None:
    updates = random_updates(pipeline, SECOND)
    file = write_lora(updates, tmp_path / "x.safetensors")
    theirs = SD3Transformer2DModel.from_pretrained(pipeline / "transformer")
    theirs.load_lora_adapter(load_file(file), prefix="transformer")
    theirs.fuse_lora()
    state = original_layout.state_of(pipeline / "transformer")
    for name, update in updates.items():
        weight = theirs.get_submodule(name).get_base_layer().weight.detach()
        torch.testing.assert_close(weight, state[f"{name}.weight"] + update.delta(), rtol=1e-5, atol=2e-5)


def test_the_header_names_the_model_by_the_widths(tmp_path: Path) -> None:
    names = {(2432, 2432): "5-large", (1536, 1536): "m", (1536, 13824): "5-medium"}  # (inputs, outputs)
    for (inputs, outputs), expected in names.items():
        layer = "transformer_blocks.0.norm1.linear" if outputs == 13824 else "transformer_blocks.0.attn.to_q"
        update = LoraUpdate(torch.ones(1, inputs), torch.ones(outputs, 1))
        file = write_lora({layer: update}, tmp_path / "x.safetensors")
        out = tmp_path / "y.safetensors"
        assert main(["export", str(file), "--format", "kohya", "--out", str(out), "--overwrite"]) == 0
        with safe_open(out, framework="pt") as handle:
            assert handle.metadata()["modelspec.architecture"] == f"stable-diffusion-3-{expected}/lora"


def test_a_lora_is_merged_into_a_single_file(pipeline: Path, tmp_path: Path) -> None:
    """Every linear layer of a file in the original layout, second attentions included."""
    updates = random_updates(pipeline)
    lora = write_lora(updates, tmp_path / "x.safetensors", "kohya")
    single = original_layout.write(pipeline, tmp_path / "sd3.5.safetensors", "transformer vae")
    merged = tmp_path / "merged.safetensors"
    assert main(["merge", str(lora), "--base", str(single), "--out", str(merged)]) == 0
    prefix = original_layout.MMDIT
    actual = {k.removeprefix(prefix): v for k, v in load_file(merged).items() if k.startswith(prefix)}
    all_close(actual, in_original_layout(pipeline, updates))


@torch.no_grad()
def velocity(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return predict_velocity(
        model,
        torch.randn(2, 16, 4, 4, generator=generator),
        torch.tensor([0.3, 0.8]),
        torch.randn(2, 9, model.config["joint_attention_dim"], generator=generator),  # type: ignore[index]
        torch.randn(2, model.config["pooled_projection_dim"], generator=generator),  # type: ignore[index]
        dtype=torch.float32,
    )


@pytest.mark.parametrize(
    ("precision", "kind", "error"),
    [(Int8(compute="fp32"), Int8Linear, 0.02), (Nf4(compute="fp32"), Nf4Linear, 0.25)],
    ids=["int8", "nf4"],
)
def test_the_second_attention_is_quantised(precision, kind: type, error: float, pipeline: Path) -> None:
    model = SD3().model_copy(update={"pretrained": str(pipeline)})
    plain, quantised = (model.load_denoiser(each, CPU) for each in (FP32(), precision))
    assert all(type(quantised.get_submodule(name)) is kind for name in SECOND)
    norm = "transformer_blocks.0.attn2.norm_q.weight"
    assert torch.equal(quantised.get_parameter(norm), plain.get_parameter(norm))
    expected = velocity(plain)
    off = ((velocity(quantised) - expected).norm() / expected.norm()).item()
    assert 0 < off < error, off


KNOWN = {
    "stabilityai/stable-diffusion-3-medium-diffusers": (2_028_328_000, 586_752),
    "stabilityai/stable-diffusion-3.5-medium": (2_243_171_520, 746_496),
    "stabilityai/stable-diffusion-3.5-large": (8_056_627_520, 1_473_792),
}


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_are_known_without_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, and those of a LoRA of rank 1 on all attention: by hand for SD3.5 Medium 586,752 + 13 x 4 x 3,072."""
    monkeypatch.setattr(family_files, "part_folder", lambda part: pytest.fail("asked the hub"))
    model = SD3(pretrained=name)
    shapes = model.architecture.shapes(fetch=False)
    assert shapes is not None
    assert (model.architecture.parameter_count(), Lora(rank=1).trainable(shapes)) == KNOWN[name]
    parts = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]
    assert [model.files.known_part(part).config() for part in parts] == [
        SD3().files.known_part(part).config() for part in parts
    ]
    assert SD3(pretrained="owner/another").architecture.shapes(fetch=False) is None


@pytest.mark.data
@pytest.mark.parametrize("size", ["medium", "large"])
def test_bundled_configs_are_the_published_ones(size: str, real_data: Path) -> None:
    published = json.loads((real_data / "sd35_config" / size / "transformer" / "config.json").read_text())
    assert SD3(pretrained=f"stabilityai/stable-diffusion-3.5-{size}").files.denoiser_config(fetch=False) == published


ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs").glob("sd35_*.json"))
ROW = re.compile(r"^\| `(sd35_\w+)` \| (.*?) \|$", re.M)
"""A configuration on the page, and what it sets."""


def test_the_page_has_every_configuration_and_each_says_what_the_page_says() -> None:
    rows = dict(ROW.findall((ROOT / "docs" / "reference" / "models.md").read_text()))
    assert set(rows) == {file.stem for file in CONFIGS} and len(rows) >= 10
    for file in CONFIGS:
        data, sets = json.loads(file.read_text()), rows[file.stem]
        assert data["name"] == file.stem and data["model"]["pretrained"].endswith(f"3.5-{file.stem.split('_')[1]}")
        assert "Predicted for the training step: " in data["about"]  # the figure: tests/docs/test_memory_pages.py
        assert f"on an {file.stem.split('_')[-1][:-2]} GB" in data["about"].replace("on a ", "on an ")
        own = with_profile(data, data["adapter"]["method"] == "full")
        memory, weights = own["memory"], own["precision"]["weights"]
        counts = {"on the card": memory.get("resident_blocks"), "checkpointed": memory.get("checkpointing")}
        for what, count in counts.items():
            said = re.search(rf"(\d+) of \d+ blocks {what}", sets)
            assert (int(said[1]) if said else None) == (count if isinstance(count, int) else None)
        assert weights in sets and ("tiles of 512 px" in sets) == (memory.get("vae_tile") == 512)
        assert ("plan" in sets) == (memory.get("modulation") == "plan")
