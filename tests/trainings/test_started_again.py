"""Runs that are started several times, each time for more steps, are one run; looking at a model changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slow_cases import slow_but
from tiny_runs import TrainOnce, merged, run_with, saved_weights

from simpletune.runs.checkpoint_folders import checkpoint_folder
from simpletune.runs.folder import read_metrics, read_rows

# Of 9 samples in micro-batches of 2, two of them a step: an epoch has 3 steps, the last with one sample.
EPOCH = 3


@pytest.fixture
def two_sources(tiny_config: dict, tmp_path: Path) -> dict:
    """A data set of six pictures and one of three, with crops, flips and dropped captions; two micro-batches a step."""
    images, first = tmp_path / "three", Path(tiny_config["data"]["path"])
    images.mkdir()
    for file in (each for number in range(3) for each in first.glob(f"{number:03d}.*")):
        shutil.copy(file, images)
    each = {"resolution": 32, "crop": "random", "flip": True, "variants": 2, "caption_dropout": 0.3}
    sources = [
        {**each, "path": str(first)},
        {**each, "path": str(images), "caption_suffix": ", again", "weight": 0.5},
    ]
    train = {"batch_size": 2, "gradient_accumulation": 2}
    return tiny_config | {"data": {"sources": sources}, "train": train}


STARTS = {
    "at both edges of epochs": (EPOCH, 2 * EPOCH, 2 * EPOCH + 1),
    "before and after an edge": (EPOCH - 1, EPOCH + 1, 2 * EPOCH + 1),
    "at every step": tuple(range(1, 2 * EPOCH + 2)),
}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"precision": {"weights": "int8", "compute": "bf16"}},
    "int8, bf16 adapter, 8-bit state": {
        "precision": {"weights": "int8", "compute": "bf16"}, "adapter": {"dtype": "bf16", "dropout": 0.2},
        "optimizer": {"name": "adamw8bit"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "form"),
    slow_but([("at both edges of epochs", "fp32")], [(starts, form) for starts in STARTS for form in FORMS]),
)
def test_a_resume_of_a_resume_is_one_run(
    starts: str, form: str, two_sources: dict, tmp_path: Path, train_once: TrainOnce
) -> None:
    """With other totals: three or more starts end in the weights, optimizer state and losses of one."""
    data, (*earlier, total) = merged(two_sources, **FORMS[form]), STARTS[starts]
    whole = run_with(data, name="whole", train={"steps": total})
    for steps in earlier:
        run_with(data, "auto", train={"steps": steps})
    run = run_with(data, "auto", train={"steps": total})
    rows, expected = read_metrics(run), read_metrics(whole)
    assert [row["epoch"] for row in rows] == [step // EPOCH for step in range(total)]
    for name in ("step", "loss", "grad_norm", "lr"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name
    for name in ("trainable.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(checkpoint_folder(each, total) / name) for each in (run, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), name


@pytest.mark.slow
def test_int8_after_three_resumes_has_the_bits_of_one_run(tiny_config: dict, tmp_path: Path) -> None:
    """The base comes from the cache of quantised ones at each start but the first."""
    data = merged(tiny_config, precision={"weights": "int8", "compute": "bf16"}, output={"cache": str(tmp_path / "c")})
    for steps in (1, 2, 3):
        run_with(data, "auto", train={"steps": steps})
    run = run_with(data, "auto", train={"steps": 4})
    whole = run_with(data, name="whole", output={"cache": str(tmp_path / "other")}, train={"steps": 4})
    ours, theirs = saved_weights(run, 4), saved_weights(whole, 4)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs) and ours.keys() == theirs.keys()


ADAPTERS = {
    "lora in bf16": {"adapter": {"method": "lora", "rank": 2, "dtype": "bf16"}},
    "lora in fp32 on int8": {"adapter": {"method": "lora", "rank": 2}, "precision": {"weights": "int8"}},
    "lora with an average": {"adapter": {"method": "lora", "rank": 2}, "ema": {"decay": 0.8}},
    "dora": {"adapter": {"method": "dora", "rank": 2}},
    "lokr in bf16": {"adapter": {"method": "lokr", "factor": 4, "rank": 1, "dtype": "bf16"}},
    "full": {"adapter": {"method": "full"}},
}
LOOKS = {"prompts": ["a red disc"], "steps": 1, "loss_samples": 1, "every": 1, "guidance": 2.0}


@pytest.mark.parametrize("adapter", slow_but(["lora in bf16"], ADAPTERS))
def test_validation_leaves_the_trained_weights_as_they_are(adapter: str, tiny_config: dict) -> None:
    """Their types and their bits, after pictures and evaluations before, between and after the steps."""
    config = {name: value for name, value in tiny_config.items() if name != "adapter"} | {"train": {"steps": 2}}
    blind = run_with(config, name="blind", **ADAPTERS[adapter])
    run = run_with(config, validation=LOOKS, **ADAPTERS[adapter])
    assert len(list(read_rows(run / "evaluations.jsonl"))) == 3 and (run / "samples/step-000001").is_dir()
    for name in ("trainable.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(checkpoint_folder(each, 2) / name) for each in (run, blind))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    wanted = torch.bfloat16 if "bf16" in adapter else torch.float32
    assert {tensor.dtype for tensor in saved_weights(run, 2).values()} == {wanted}


@pytest.mark.slow
def test_families_share_a_cache_folder(tiny_config: dict, unet_pipeline: Callable[..., Path], tmp_path: Path) -> None:
    """SD 1.5 and SDXL have latents of the same shape from other autoencoders: each finds its own, in any order."""
    losses: dict[str, list[list[float]]] = {}
    for order, cache in ((("sd15", "sdxl"), "one"), (("sdxl", "sd15"), "two")):
        for family in (*order, *order):
            model = {"family": family, "pretrained": str(unet_pipeline(family))}
            changes = {"model": model, "output": {**tiny_config["output"], "cache": str(tmp_path / cache)}}
            data = tiny_config | changes | {"data": {**tiny_config["data"], "resolution": 64}, "train": {"steps": 2}}
            run = run_with(data, name=f"{family}-{cache}-{len(losses.get(family, []))}")
            losses.setdefault(family, []).append([row["loss"] for row in read_metrics(run)])
        assert len(list((tmp_path / cache / "latents").iterdir())) == 2
    assert all(each == found[0] for found in losses.values() for each in found)
    assert losses["sd15"][0] != losses["sdxl"][0]
