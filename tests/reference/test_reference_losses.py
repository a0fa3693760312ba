"""First losses against an independent implementation (tests/reference), which does not import the package."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from launching import Launcher

from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import validate
from simpletune.data.demo import demo_scenes
from simpletune.runs.checkpoint import TRAINABLE, checkpoint_folder
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

REFERENCE = Path(__file__).parent / "train.py"
AS_A_SCRIPT = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEPS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A two-layer pipeline (one whole block, one last block) and pictures of several shapes."""
    from PIL import Image

    root = tmp_path_factory.mktemp("reference")
    tiny_sd3.build(root / "pipeline", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=5, dtype="fp32")
    scenes = demo_scenes.sample_scenes(5, seed=4, style="striped")
    demo_scenes.write_folder(root / "data", scenes, seed=4, pixels=96)
    for number, size in enumerate([(96, 48), (48, 96), (50, 90)]):
        file = root / "data" / f"00{number}.png"
        Image.open(file).resize(size).save(file)
    return root / "pipeline", root / "data"


Losses = Callable[..., list[float]]


@pytest.fixture
def reference_losses(inputs: tuple[Path, Path], launcher: Launcher, tmp_path: Path) -> Losses:
    """What the reference computes, given some settings: in a process in which no run has changed anything."""
    return functools.partial(computed, launcher, *inputs, tmp_path)


def computed(
    launcher: Launcher, pipeline: Path, data: Path, folder: Path, changes: dict, lora: Path | None = None
) -> list[float]:
    settings = {
        "seed": 11, "resolution": 48, "batch_size": 2, "accumulation": 2, "steps": STEPS, "lr": 3e-3,
        "weight_decay": 0.01, "clip_norm": 0.5, "sigma": "logit_normal", "mean": 0.2, "std": 0.9, "shift": 1.7,
        "caption_dropout": 0.3, "t5": True, "t5_length": 8,
    } | changes  # fmt: skip
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    words = [str(REFERENCE), str(pipeline), str(data), str(file), *(["--lora", str(lora)] if lora else [])]
    outcome = launcher.programs(AS_A_SCRIPT, words)
    assert outcome.codes == [0], outcome.said
    return json.loads(outcome.said[0].splitlines()[-1])


def config_of(inputs: tuple[Path, Path], tiny_config: dict, method: str, sigma: str) -> dict:
    """The run that ``reference_losses`` computes."""
    pipeline, data = inputs
    objective = {"sigma": sigma, "shift": 1.7} | ({} if sigma == "uniform" else {"logit_mean": 0.2, "logit_std": 0.9})
    return tiny_config | {
        "model": {"pretrained": str(pipeline), "t5_length": 8, "t5": method == "full"},
        "data": {"path": str(data), "resolution": 48, "caption_dropout": 0.3},
        "adapter": {"method": "full"} if method == "full" else {"method": "lora", "rank": 3, "alpha": 4.5},
        "objective": objective,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.01},
        "train": {
            "steps": STEPS, "batch_size": 2, "gradient_accumulation": 2, "seed": 11, "clip_norm": 0.5,
        },
        "memory": {"checkpointing": "all"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "sigma, method",
    [
        ("uniform", "full"),
        ("logit_normal", "lora"),
        pytest.param("logit_normal", "full", marks=pytest.mark.slow),
        pytest.param("uniform", "lora", marks=pytest.mark.slow),
    ],
)
def test_first_losses(
    inputs: tuple[Path, Path], method: str, sigma: str, tiny_config: dict, tmp_path: Path, reference_losses: Losses
) -> None:
    config = config_of(inputs, tiny_config, method, sigma)
    lora = initial_lora(config, tmp_path) if method == "lora" else None
    run = train(validate(config, "ours"))
    ours = [row["loss"] for row in read_metrics(run)]
    changes = {"t5": method == "full", "sigma": sigma} | ({} if lora is None else {"lora_alpha": 4.5})
    theirs = reference_losses(changes, lora)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(set(ours)) == STEPS


@pytest.mark.parametrize(
    "batch_size, accumulation", [(2, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 4), (4, 2)))]
)
def test_losses_of_two_processes(
    inputs: tuple[Path, Path],
    batch_size: int,
    accumulation: int,
    tiny_config: dict,
    launcher: Launcher,
    reference_losses: Losses,
) -> None:
    """Unequal counts in the processes, and one without a sample; later losses follow from the gradients."""
    portions = {"batch_size": batch_size}
    config = config_of(inputs, tiny_config, "full", "uniform")
    config["train"] |= portions | {"gradient_accumulation": accumulation}
    outcome = launcher.train(config, config)
    assert outcome.codes == [0, 0], outcome.said
    ours = [row["loss"] for row in read_metrics(Path(config["output"]["runs"]) / config["name"])]
    changes = portions | {"accumulation": accumulation, "sigma": "uniform"}
    assert ours == pytest.approx(reference_losses(changes), rel=1e-5)


def initial_lora(config: dict, folder: Path) -> Path:
    """The LoRA's initial weights, under the reference's names: trained for one step at a rate of nothing."""
    from safetensors.torch import load_file, save_file

    still = config | {"name": "still", "optimizer": {"lr": 1e-30}, "train": config["train"] | {"steps": 1}}
    run = train(validate(still, "still"))
    state = load_file(checkpoint_folder(run, 1) / TRAINABLE)
    file = folder / "initial.safetensors"
    save_file({name.replace(".default", ""): tensor for name, tensor in state.items()}, file)
    return file
