"""LoRAs of ``model.loras`` that are used only while training: pictures, comparison and result are without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import pixels_of
from safetensors.torch import load_file
from tiny_runs import TrainOnce, merged, resumed_from, run_with, saved_weights

from benchmarks.tiny_models import tiny_zimage
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.models.zimage.zimage_lora import NAMES
from simpletune.runs.folder import read_metrics
from simpletune.system.checksums import sha256_of
from simpletune.system.options import ConfigError, UserError

PROMPT = "a picture of a large blue heart"
PLAN = {"resident_blocks": 1, "checkpointing": "all", "modulation": "plan", "modulation_window": 3}
SMALL = ["--steps", "2", "--device", "cpu"]


@pytest.fixture(scope="session")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_zimage.build(tmp_path_factory.mktemp("turbo") / "pipeline", shift=3.0)


@pytest.fixture
def config(tiny_config: dict, turbo: Path) -> dict[str, Any]:
    return tiny_config | {
        "model": {"family": "zimage", "pretrained": str(turbo), "text_length": 96},
        "data": tiny_config["data"] | {"resolution": 64},
        "validation": {"prompts": [PROMPT], "every": 2, "steps": 2, "guidance": 1.0, "loss_samples": 2},
        "checkpoint": {"every": 2},
    }


def assistant(folder: Path, seed: int = 0) -> Path:
    """Of attention, and of a modulation, as ostris's."""
    draw = torch.Generator().manual_seed(seed)
    layers = {"layers.0.attention.to_q": (48, 48), "layers.1.adaLN_modulation.0": (192, 48)}
    updates = {
        layer: LoraUpdate(torch.randn(2, inputs, generator=draw), torch.randn(outputs, 2, generator=draw))
        for layer, (outputs, inputs) in layers.items()
    }
    return write_lora(updates, folder / "assistant.safetensors", names=NAMES)


def pictures(run: Path) -> dict[str, Any]:
    return {str(file.relative_to(run)): pixels_of(file) for file in sorted((run / "samples").rglob("*.png"))}


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run) if "loss" in row]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": {"weights": "int8"}, "memory": PLAN},
        pytest.param({"precision": {"weights": "nf4"}}, marks=pytest.mark.slow),
    ],
    ids=["bf16", "int8-streamed-plan", "nf4"],
)
def test_pictures_and_result_are_without_it_and_training_is_with_it(
    changes: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit: base pictures as of a run without it, losses as of a run on top of it, and drawing as by generate."""
    file = assistant(tmp_path)

    def trained(name: str, *loras: str) -> Path:
        return run_with(merged(config, name=name, model={"loras": list(loras)}, **changes))

    marked, plain, under = trained("marked", f"training:{file}"), trained("plain"), trained("under", str(file))
    assert losses(marked) == losses(under) != losses(plain)
    ours, without, wrong = pictures(marked), pictures(plain), pictures(under)
    first = next(name for name in ours if "/base/" in name)
    assert ours[first] == without[first] != wrong[first]
    weights = saved_weights(marked, 4)
    assert all(torch.equal(tensor, saved_weights(under, 4)[name]) for name, tensor in weights.items())
    last = max(name for name in ours if "step-" in name)
    words = ["--run", str(marked), "--prompt", PROMPT, "--guidance", "1", "--size", "64x64", *SMALL]
    assert main(["generate", *words, "--out", str(tmp_path / "g.png")]) == 0
    assert pixels_of(tmp_path / "g.png") == ours[last] != wrong[last]
    columns = []
    for run in (marked, under) if not changes else ():  # the latter has the base without its LoRAs, too
        out = tmp_path / run.name
        assert main(["compare", str(run), "--prompt", PROMPT, "--out", str(out), *SMALL]) == 0
        columns.append(len(json.loads((out / "compare.json").read_text())["models"]))
    assert not columns or columns[0] + 1 == columns[1]


@pytest.fixture
def run(config: dict[str, Any], tmp_path: Path, train_once: TrainOnce) -> tuple[dict[str, Any], Path]:
    data = merged(config, name="told", model={"loras": [f"training:{assistant(tmp_path)}:0.5"]})
    return data, run_with(data)


def test_card_header_and_report_name_it(run: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, folder = run
    digest = sha256_of(tmp_path / "assistant.safetensors")
    card = (folder / "README.md").read_text()
    assert f"strength 0.5, SHA-256 {digest[:16]}; used only while training" in card and "simpletune merge" not in card
    (row,) = json.loads((folder / "summary.json").read_text())["on_top_of"]
    assert (row["sha256"], row["only_training"]) == (digest, True)
    assert all("adaLN" not in key for key in load_file(folder / "pytorch_lora_weights.safetensors"))
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    assert "used only while training" in (tmp_path / "report.html").read_text()
    assert main(["merge", str(folder), "--out", str(tmp_path / "merged"), "--denoiser-only"]) == 0
    whole = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    name = "layers.1.adaLN_modulation.0.weight"
    base = load_file(Path(run[0]["model"]["pretrained"]) / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(whole[name], base[name])


def test_another_one_is_refused_on_resume(run: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    data, folder = run
    for loras in ([], [data["model"]["loras"][0].removeprefix("training:")]):
        with pytest.raises(UserError, match="model.loras"):
            resumed_from(folder, merged(data, model={"loras": loras}), 2)
        shutil.rmtree(folder.with_name("from-2"))
    assistant(tmp_path, seed=1)
    with pytest.raises(UserError, match="has the SHA-256 .* but .* was trained on top of"):
        resumed_from(folder, data, 2)


def test_it_cannot_be_taken_out_of_trained_weights(config: dict[str, Any], tmp_path: Path) -> None:
    data = merged(config, model={"loras": [f"training:{assistant(tmp_path)}"]}) | {"adapter": {"method": "full"}}
    with pytest.raises(ConfigError, match="is used only while training, but adapter.method full trains the weights"):
        validate(data, "full")
