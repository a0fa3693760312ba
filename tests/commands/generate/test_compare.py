"""Comparing runs, their checkpoints and full models: what a name stands for, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from command_line import parsed
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_encoders import write_dino

from simpletune.apps.cli.generate import compare_arguments, generate_arguments
from simpletune.commands.generate.compare import (
    compare,
    drop_duplicates,
    models_to_compare,
    open_encoder,
    resolve_weights,
)
from simpletune.commands.generate.generate import choose_weights, default_prompt, generate
from simpletune.commands.generate.session import GeneratedImages, GenerationSession, open_session
from simpletune.config.load import validate
from simpletune.engine.quant.precision import FP32
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs import checkpoint
from simpletune.runs.weights import BASE, Weights, checkpoints_of, overwrite
from simpletune.runs.weights_names import LORA_FILE
from simpletune.stages.png import generation_parameters
from simpletune.stages.sample import ImageRequest
from simpletune.system.options import UserError
from simpletune.training.train import train


@pytest.fixture(scope="module")
def runs(tiny_pipeline: Path, tiny_images: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs: ``lora``, and ``full`` with an average of its weights; two checkpoints each."""
    place = tmp_path_factory.mktemp("compared")
    for name, more in {"lora": {"rank": 2}, "full": {}}.items():
        config = {
            "name": name, "device": "cpu", "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
            "data": {"path": str(tiny_images), "resolution": 32}, "adapter": {"method": name, **more},
            "precision": {"weights": "fp32"}, "optimizer": {"lr": 0.05}, "train": {"steps": 4},
            "memory": {"checkpointing": "none"}, "checkpoint": {"every": 2}, "profile": {"max_traces": 0},
            "validation": {"prompts": [], "steps": 2, "loss_samples": 0},
            "output": {"runs": str(place), "profiles": str(place / "p"), "cache": str(shared_cache), "report": False},
        }  # fmt: skip
        train(validate(config | ({"ema": {"decay": 0.5}} if name == "full" else {}), "test"))
    return place


def saved(run: Path, step: int) -> Path:
    return checkpoint.checkpoint_folder(run, step)


def grey(
    session: GenerationSession, models: Sequence[Weights], requests: Sequence[ImageRequest]
) -> list[GeneratedImages]:
    """Stands in for ``GenerationSession.draw_all`` where the pictures' values do not matter."""
    with session.stages.stage("denoise"):
        image, latents, count = Image.new("RGB", (32, 32), "grey"), torch.zeros(1, 16, 4, 4), len(requests)
    return [GeneratedImages(weights, [image] * count, [latents] * count, 0.1, 0.1) for weights in models]


def test_every_checkpoint_is_drawn_beside_the_base(runs: Path, tmp_path: Path, capsys) -> None:
    run = runs / "lora"
    words = ["--checkpoints", "--prompt", "a disc", "--output", tmp_path, run, f"{run}:0.5"]
    figures = json.loads(compare(parsed(compare_arguments, *words)).with_name("compare.json").read_text())
    assert [each["title"] for each in figures["models"]] == ["base", "LoRA lora x 0.5", "lora step 2", "lora step 4"]
    base, _, first, last = (each["latent_distance_from_base"] for each in figures["models"])
    assert base == [0] < first < last, "the result is the last checkpoint: not a column of its own"
    said = capsys.readouterr().out
    assert said.count("same weights") == 1 and "LoRA lora x 1 and lora step 4 have the same" in said


def test_a_full_result_is_its_last_checkpoint_too(runs: Path, tmp_path: Path, capsys) -> None:
    full = runs / "full"
    first, last = checkpoints_of(full)
    (result,) = resolve_weights(str(full))
    kept = drop_duplicates([BASE, result, first, last])
    assert [each.title for each in kept] == ["base", "full step 2", "full step 4"]
    assert kept[2].denoiser == full / "transformer", "a checkpoint's would not be held in the precision asked for"
    assert "full full and full step 4 have the same weights" in capsys.readouterr().out
    elsewhere = tmp_path / "other"
    shutil.copytree(full, elsewhere)
    file = elsewhere / last.trained.relative_to(full)
    values = load_file(file)
    name = next(iter(values))
    save_file(values | {name: values[name] + 1}, file)
    models = [*resolve_weights(str(elsewhere)), *checkpoints_of(elsewhere)]
    assert drop_duplicates(models) == models, "the values decide, not the step"


def test_the_first_named_run_gives_the_settings_and_keeps_the_comparison(
    runs: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationSession, "generate_all", grey)
    for number, name in enumerate(("first", "second", "newest")):
        shutil.copytree(runs / "lora", tmp_path / name)
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text())
        config["validation"] |= {"prompts": [f"a disc of {name}"], "seed": number}
        file.write_text(json.dumps(config))
    os.utime(tmp_path / "newest" / "summary.json", (2**32, 2**32))
    step = checkpoint.checkpoint_folder(tmp_path / "first", 2)
    done = []
    for words in ([step, tmp_path / "second"], [tmp_path / "first" / LORA_FILE], [tmp_path / "second"], []):
        sheet = compare(parsed(compare_arguments, *words, "--runs", tmp_path))
        images = json.loads(sheet.with_name("compare.json").read_text())["pictures"]
        done.append((sheet.parent.relative_to(tmp_path).as_posix(), images[0]["prompt"], images[0]["seed"]))
    assert done == [
        ("first/compare/0001", "a disc of first", 0), ("first/compare/0002", "a disc of first", 0),
        ("second/compare/0001", "a disc of second", 1), ("newest/compare/0001", "a disc of newest", 2),
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert f"settings of {tmp_path / 'newest'}, the newest run" in said and "second, the newest" not in said
    assert len(list((tmp_path / "first" / "compare" / "0001").glob("*/000.png"))) == 3, "the second adds no column"
    latest = tmp_path / "first" / "compare" / "latest.html"
    assert f"{latest}: always opens" in said and 'url=0002/compare.html"' in latest.read_text()


def test_an_empty_prompt_is_drawn_as_it_is(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "lora", run)
    first = generate(parsed(generate_arguments, "--run", run, "--prompt", ""))
    monkeypatch.setattr(GenerationSession, "generate_all", grey)
    second = generate(parsed(generate_arguments, "--run", run, "--prompt", "", "--base"))
    assert (first.name, second.name) == ("0001-lora-seed0.png", "0002-base-seed0.png")
    assert generation_parameters(first)["prompt"] == "" and generation_parameters(first)["loras"] == [["run", 1.0]]
    assert generation_parameters(second)["loras"] == []
    with pytest.raises(UserError, match="--out: .*0001-lora-seed0.png exists. .* or add --overwrite"):
        generate(parsed(generate_arguments, "--run", run, "--prompt", "x", "--out", first))
    assert generation_parameters(first)["prompt"] == ""
    generate(parsed(generate_arguments, "--run", run, "--prompt", "x", "--out", first, "--overwrite"))
    assert generation_parameters(first)["prompt"] == "x"


def test_checkpoints_of_a_full_model_replace_the_bases_weights(runs: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    first, last = checkpoints_of(runs / "full")
    average = load_file(saved(runs / "full", 4) / checkpoint.AVERAGE)
    assert last.trained == saved(runs / "full", 4) / checkpoint.AVERAGE and first.title == "full step 2"
    transformer = SD3(pretrained=str(tiny_pipeline)).load_denoiser(FP32(), torch.device("cpu"))
    parameters = dict(transformer.named_parameters())
    before = parameters["proj_out.weight"].clone()
    overwrite(transformer, last.trained)
    assert not torch.equal(parameters["proj_out.weight"], before)
    for name, tensor in average.items():
        assert torch.equal(parameters[name], tensor), name
    for wrong, message in (
        ({"proj_out.weight": torch.ones(2, 2)}, r"proj_out.weight has shape \[2, 2\], but the model has \[64"),
        ({"proj_out.weigth": torch.ones(2)}, "1 of its tensors are not in this model .proj_out.weigth"),
    ):
        save_file(wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(UserError, match=message):
            overwrite(transformer, tmp_path / "wrong.safetensors")


def test_models_that_cannot_be_held_alike_are_told(runs: Path, tmp_path: Path, capsys) -> None:
    words = ["base", saved(runs / "full", 4), "--run", runs / "lora", "--precision", "int8", "--prompt", "a disc"]
    compare(parsed(compare_arguments, *words, "--output", tmp_path))
    said = capsys.readouterr().out
    assert "precisions differ" in said and "base: int8; " in said and "--precision bf16" in said
    with pytest.raises(UserError, match="--out: .* is not empty. Choose another name, or remove it"):
        compare(parsed(compare_arguments, *words, "--output", tmp_path))


def test_what_a_name_stands_for(runs: Path, tmp_path: Path) -> None:
    transformer = tmp_path / "a_model"
    shutil.copytree(runs / "full" / "transformer", transformer)
    assert resolve_weights("base") == [BASE]
    assert resolve_weights(f"{runs / 'lora'}:0.3")[0].loras == [(runs / "lora" / LORA_FILE, 0.3)]
    assert resolve_weights(str(runs / "full"))[0].denoiser == runs / "full" / "transformer"
    assert resolve_weights(str(saved(runs / "full", 2)))[0].trained == saved(runs / "full", 2) / checkpoint.AVERAGE
    assert resolve_weights(str(transformer))[0].denoiser == transformer
    with pytest.raises(
        UserError, match="lora:abc: the strength 'abc' is not a number from .* Write one, as in .*lora:0.8"
    ):
        resolve_weights(f"{runs / 'lora'}:abc")
    for place in (runs / "full", transformer, saved(runs / "full", 2)):
        with pytest.raises(UserError, match=r"a full model has no strength. Leave out :0.5"):
            resolve_weights(f"{place}:0.5")


def test_a_lora_is_drawn_at_each_strength_unless_it_has_its_own(runs: Path) -> None:
    file, words = runs / "lora" / LORA_FILE, ["--run", runs / "lora"]
    args = parsed(compare_arguments, *words, "--lora", file, "--lora", f"{file}:0.2", "--scale", "0.4", "--scale", "2")
    assert [each.scale for each in models_to_compare(open_session(args), args)[1:]] == [0.4, 2.0, 0.2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model {base} --checkpoints x", "x does not exist. Give a LoRA file"),
        ("--model {base} --checkpoints", "--checkpoints: no run is named"),
        ("--model {base}", "neither a run nor a LoRA is named. Use --run RUN"),
        ("--run {empty} --checkpoints", "has no checkpoint. Remove the option"),
        ("--run {empty}", "has no result and no checkpoint"),
    ],
)
def test_nothing_to_compare_is_said(words: str, message, runs: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    shutil.copy(runs / "lora" / "config.json", tmp_path)
    args = parsed(compare_arguments, *words.format(base=tiny_pipeline, empty=tmp_path).split())
    with pytest.raises(UserError, match=message):
        models_to_compare(open_session(args), args)


def test_the_full_model_of_a_run_is_its_own_or_the_base_with_its_lora(runs: Path, tiny_pipeline: Path) -> None:
    def asked(*words: object) -> tuple:
        args = parsed(generate_arguments, *words)
        return choose_weights(open_session(args), args)

    name, full = asked("--run", runs / "full", "--full")
    assert (name, full.denoiser, full.merged) == ("full", runs / "full" / "transformer", False)
    folded = asked("--run", runs / "lora", "--full")[1]
    assert folded.merged and folded.lora == runs / "lora" / LORA_FILE
    with pytest.raises(UserError, match="neither a run nor a LoRA is named. Use --run RUN"):
        asked("--model", tiny_pipeline)


def test_a_run_without_prompts_draws_what_it_saw(runs: Path, tiny_images: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["--run", tmp_path / "run"]
    shutil.copytree(runs / "lora", run)
    first = min(tiny_images.glob("*.txt")).read_text().strip()
    assert default_prompt(open_session(parsed(generate_arguments, *words))) == first
    (run / "samples" / "base").mkdir(parents=True)
    start = ["--image", min(tiny_images.glob("*.png")), "--strength", "0.5", "--no-t5", "--prompt", "a green disc"]
    drawn = generate(parsed(generate_arguments, *words, *start, "--output", run / "samples" / "base" / "prompt-00.png"))
    assert drawn.parent == run / "samples" / "base"
    assert default_prompt(open_session(parsed(generate_arguments, *words))) == "a green disc"


def test_likeness_by_a_vision_transformer(runs: Path, tmp_path: Path) -> None:
    """Its figures are those of ``simpletune evaluate``: test_encoders.py."""
    dino, words = write_dino(tmp_path / "dino"), ["--run", runs / "lora", "--prompt", "a disc"]
    sheet = compare(parsed(compare_arguments, *words, "--scale", "8", "--dino", dino, "--output", tmp_path / "out"))
    base, lora = json.loads(sheet.with_name("compare.json").read_text())["models"]
    assert base["dino_base"] == pytest.approx([1.0]) and -1 <= lora["dino_base"][0] < 0.9999
    with pytest.raises(UserError, match="--dino: .*nowhere does not exist. Give a folder or a hub name"):
        open_encoder("--dino", str(tmp_path / "nowhere"), torch.device("cpu"))
    with pytest.raises(UserError, match="--clip: .* is a dino model. Use one of clip"):
        open_encoder("--clip", str(dino), torch.device("cpu"))
    save_file({}, dino / "model.safetensors")
    with pytest.raises(UserError, match=r"--dino: .* lacks \d+ weights of its model"):
        open_encoder("--dino", str(dino), torch.device("cpu"))
