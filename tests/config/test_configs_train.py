"""Every configuration in configs/ trains, scaled down to the tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tiny_sd15
import tiny_sdxl
from slow_cases import slow_but

from benchmarks.tiny_models import tiny_klein, tiny_qwen_image, tiny_zimage
from simpletune.adapters.methods.hypernetwork import Hypernetwork
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.config.explain import explain
from simpletune.config.load import read_config, shipped_files
from simpletune.config.resolve import resolve_model_folder
from simpletune.engine.memory.profiles import with_profile
from simpletune.runs.result import result_files
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
TRACED = "sd3_medium_lora_4gb.json"  # one has a trace: what profiling adds is the same for all
FILES = list(shipped_files().values())
FAST = (  # one of each family, LoRA, full fine-tuning, embeddings alone and a slider, and most levers
    "demo_embeddings", "sd15_lora", "sd15_slider", "sd3_medium_full_8gb", "sd3_medium_lora_4gb", "sdxl_lora_6gb",
)  # fmt: skip
OF_UNETS = ("sd15", "sdxl")


def for_one_block(file: Path) -> list[str]:
    """Counts of blocks, the file's own or its profile's, brought down to the tiny model's one block.

    The count of resident blocks becomes 0, so that the one block streams.
    """
    data = json.loads(file.read_text())
    memory = with_profile(data, data["adapter"]["method"] != "lora").get("memory", {})
    overrides = []
    if isinstance(memory.get("checkpointing"), int):
        overrides.append("memory.checkpointing=1")
    if memory.get("resident_blocks") is not None:
        overrides.append("memory.resident_blocks=0")
    return overrides


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny pipeline of each family but SD3."""
    folder = tmp_path_factory.mktemp("families")
    of_unets = {"sd15": tiny_sd15.build(folder / "sd15"), "sdxl": tiny_sdxl.build(folder / "sdxl")}
    of_transformers = {"klein": tiny_klein, "zimage": tiny_zimage, "qwen_image": tiny_qwen_image}
    return of_unets | {family: tiny.build(folder / family) for family, tiny in of_transformers.items()}


def tiny_model(file: Path, tiny_config: dict, tiny_models: dict[str, Path]) -> list[str]:
    """Overrides that take a tiny model of the file's family, its smallest pictures, and few of them a step."""
    data = json.loads(file.read_text())
    few = ["train.batch_size=2", "train.gradient_accumulation=1"] if data["train"].get("batch_size", 1) >= 16 else []
    few += [f"model.{part}=null" for part in ("unet", "transformer") if data.get("model", {}).get(part)]
    family = data.get("model", {}).get("family", "")
    side = 32 if family in ("", "sd3") else 128 if "concept" in data and family in OF_UNETS else 64
    size = f"concept.resolutions=[{side}]" if "concept" in data else f"data.resolution={side}"
    if (tiny := tiny_models.get(family)) is not None:
        return [f"model.pretrained={tiny}", size, *few]
    return [*few, f"model.pretrained={tiny_config['model']['pretrained']}", "model.t5_length=8", size]


def trained_on(file: Path, tiny_config: dict) -> list[str]:
    """Overrides that take the tiny pictures, or few steps of a slider's drawings."""
    if "concept" in json.loads(file.read_text()):
        return ["concept.drawing_steps=3", "validation.loss_samples=0"]
    return [f"data.path={tiny_config['data']['path']}", "validation.loss_samples=1"]


def captions(file: Path) -> list[str]:
    """An override that writes the token of embeddings into every caption."""
    embeddings = (json.loads(file.read_text()).get("text") or {}).get("embeddings")
    return [f"data.prompt=a {embeddings['token']} picture"] if embeddings else []


@pytest.mark.parametrize("file", slow_but([shipped_files()[name] for name in FAST], FILES), ids=lambda file: file.name)
def test_trains_scaled_down(file: Path, tiny_config: dict, tiny_models: dict[str, Path]) -> None:
    overrides = [
        *tiny_model(file, tiny_config, tiny_models), "device=cpu",
        *trained_on(file, tiny_config), "train.steps=2", "schedule.warmup_steps=1",
        "checkpoint.every=1", "validation.every=null", "validation.steps=2",
        "validation.seed=5", "validation.width=null",
        "validation.height=null", f"profile.max_traces={int(file.name == TRACED)}", "output.report=false",
        *(f"output.{key}={value}" for key, value in tiny_config["output"].items() if key != "report"),
        *for_one_block(file), *captions(file),
    ]  # fmt: skip
    config, _ = read_config(file, overrides)
    assert config.about in explain(config)
    run = train(config)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and (summary["eval_loss_after"] is None) == (config.concept is not None)
    assert all(file.exists() for file in result_files(config, run))
    assert (run / "samples" / "grid.png").exists()
    traces = list((run.parents[1] / "profiles").rglob("*.pt.trace.json.gz"))
    assert len(traces) == (file.name == TRACED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_trains_the_denoiser_at_its_real_size(file: Path, tiny_config: dict) -> None:
    """What a preset trains by its published model's shapes: layers of the denoiser, or words where it says so."""
    model = json.loads(file.read_text()).get("model", {})
    here = [f"model.{part}=null" for part in ("unet", "transformer") if model.get(part)]
    if model.get("pretrained", "").startswith("runs/"):  # which the file's own preparation makes
        here.append(f"model.pretrained=demo:tiny-{model.get('family', 'sd3')}")
    config, _ = read_config(file, [*trained_on(file, tiny_config), *captions(file), *here])
    shapes = dict(resolve_model_folder(config).model.architecture.known_shapes())
    trained, whole = config.adapter.trainable(shapes), sum(math.prod(shape) for shape in shapes.values())
    rate = config.optimizer.lr
    assert rate > 0 and config.train.steps != 0
    if config.adapter.method == "none":
        assert trained == 0 and config.text is not None and config.text.embeddings is not None
    elif config.adapter.trains_base:
        assert whole / 100 < trained <= whole and config.precision.trainable
    else:
        assert isinstance(config.adapter, TargetedMethod | Hypernetwork)
        assert whole / 10_000 < trained < whole
    if isinstance(config.adapter, TargetedMethod):
        layers = config.adapter.modules(shapes)
        assert layers and all(f"{layer}.weight" in shapes for layer in layers)
        units = config.model.architecture.units_among(shapes)
        assert any(layer.startswith(units) for layer in layers)
