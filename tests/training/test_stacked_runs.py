"""``model.loras``: runs on top of other LoRAs train as on the merged model, under every precision and lever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import parsed
from launching import Launcher
from PIL import Image, ImageChops
from safetensors.torch import load_file, save_file
from tiny_runs import TrainOnce, merged, run_with, saved_weights
from two_processes import run_of, together

from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.apps.cli.generate import compare_arguments
from simpletune.apps.cli.main import main
from simpletune.commands.generate.compare import FIGURES, models_to_compare
from simpletune.commands.generate.session import open_session
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.runs import checkpoint
from simpletune.runs.folder import EVALUATIONS, read_metrics, read_rows
from simpletune.runs.model_card import CARD
from simpletune.system.checksums import sha256_of
from simpletune.system.options import ConfigError, UserError
from simpletune.system.safetensors_file import read_header
from simpletune.training.class_images import class_folder, class_requests
from simpletune.training.prepare import prepare_only

WEIGHTS = "diffusion_pytorch_model.safetensors"
CACHED = ["first", "second"]  # names of runs, of which the second reads the quantised base from the cache


@pytest.fixture
def style(tiny_config: dict, copy_run: TrainOnce) -> Path:
    return copy_run(tiny_config | {"name": "style", "checkpoint": {"every": 2}})


def on_top_of(*loras: object, **model: object) -> dict:
    return {"loras": [str(lora) for lora in loras], **model}


def merge(*words: object, out: Path) -> Path:
    assert main(["merge", *map(str, words), "--out", str(out)]) == 0
    return out


def assert_equal(one: Path, other: Path) -> None:
    torch.testing.assert_close(load_file(one), load_file(other), rtol=0, atol=0)


def assert_equal_images(one: Path, other: Path) -> None:
    assert ImageChops.difference(*(Image.open(file).convert("RGB") for file in (one, other))).getbbox() is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"precision": {"weights": "int8"}, "memory": {"checkpointing": "all", "resident_blocks": 0}}, CACHED),
        ({"precision": {"weights": "nf4"}, "train": {"reduce": "exact"}, "adapter": {"method": "dora", "rank": 2}},
         CACHED),
        ({"precision": {"weights": "fp32", "compute": "fp16"}, "memory": {"modulation": "plan"}}, ["first"]),
        ({"adapter": {"method": "partial"}}, ["first"]),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_training_on_the_merged_model(
    changes: dict, names: list[str], tiny_config: dict, style: Path, tmp_path: Path
) -> None:
    """As a LoRA in fp32 the next test trains."""
    tiny_config |= {"adapter": changes.pop("adapter", tiny_config["adapter"]), "train": {"steps": 2}}
    loras = (f"{style}:0.8", f"{style}@2")
    whole = merge(*loras, "--base", tiny_config["model"]["pretrained"], out=tmp_path / "whole")
    expected = run_with(tiny_config, name="whole", model={"transformer": str(whole)}, **changes)
    if names == CACHED:
        run_with(tiny_config, name="plain", **changes)  # whose quantised base is another
    for name in names:
        run = run_with(tiny_config, name=name, model=on_top_of(*loras), **changes)
        assert [row["loss"] for row in read_metrics(run)] == [row["loss"] for row in read_metrics(expected)]
        result = Path("transformer") / WEIGHTS if (run / "transformer").exists() else Path(OUTPUT)
        assert_equal(run / result, expected / result)


def test_its_result_on_top_of_them_draws_what_training_drew(tiny_config: dict, style: Path, tmp_path: Path) -> None:
    changes = {"validation": {"prompts": ["a red disc"], "steps": 2, "loss_samples": 1}}
    run = run_with(tiny_config, name="child", model=on_top_of(f"{style}:0.8"), **changes)
    drawn = {}
    for name, words in {"own": [], "base": ["--base"], "full": ["--full"]}.items():
        drawn[name] = tmp_path / f"{name}.png"
        assert main(["generate", "--run", str(run), "--out", str(drawn[name]), *words]) == 0
    assert_equal_images(drawn["own"], run / "samples/step-000004/prompt-00.png")
    assert_equal_images(drawn["base"], run / "samples/base/prompt-00.png")
    with pytest.raises(AssertionError):
        assert_equal_images(drawn["own"], drawn["base"])
    assert '"base_loras": [["style", 0.8]]' in Image.open(drawn["own"]).info["simpletune"]
    # The file holds only what was trained: on the merged model it does the same.
    whole = merge(f"{style}:0.8", "--base", tiny_config["model"]["pretrained"], out=tmp_path / "whole")
    on_whole = run_with(tiny_config, name="on_whole", model={"transformer": str(whole)}, **changes)
    assert_equal(run / OUTPUT, on_whole / OUTPUT)
    rows, of_whole = (list(read_rows(each / EVALUATIONS)) for each in (run, on_whole))
    assert rows == of_whole and len(rows) == 2, "the loss before training is that of the base with them"
    assert " before (the base with its LoRAs), " in (run / CARD).read_text()
    assert_equal_images(on_whole / "samples/step-000004/prompt-00.png", drawn["own"])
    # merge RUN merges both into the base that the run names
    both = merge(run, out=tmp_path / "both")
    assert_equal(both / WEIGHTS, merge(run, "--base", whole, out=tmp_path / "expected") / WEIGHTS)


def test_compare_shows_the_base_without_them_too(tiny_config: dict, style: Path, tmp_path: Path) -> None:
    run = run_with(tiny_config, name="child", model=on_top_of(style), train={"steps": 1})
    words = ["--prompt", "a red disc", "--steps", "1", "--scale", "1", "--out", str(tmp_path / "out")]
    assert main(["compare", "--run", str(run), *words]) == 0
    models = json.loads((tmp_path / "out" / FIGURES).read_text())["models"]
    assert [each["title"] for each in models] == ["base alone", "base", "LoRA child x 1"]
    assert models[1]["latent_distance_from_base"][0] > 0
    args = parsed(compare_arguments, "--run", style, "--scale", "1")
    assert [each.title for each in models_to_compare(open_session(args), args)] == ["base", "LoRA style x 1"]


def test_finish_and_whole_models_have_the_same_base(tiny_config: dict, style: Path) -> None:
    data = tiny_config | {"adapter": {"method": "partial"}}
    validation = {"prompts": ["a red disc"], "steps": 1, "loss_samples": 0}
    run = run_with(data, name="child", model=on_top_of(style), checkpoint={"every": 4}, validation=validation)
    shutil.copytree(run / "transformer", expected := run.parent / "expected")
    shutil.rmtree(run / "transformer")
    (run / "summary.json").unlink()
    assert main(["finish", str(run)]) == 0
    assert_equal(run / "transformer" / WEIGHTS, expected / WEIGHTS)
    for number, model in enumerate((run, f"{run}@4")):  # which has them already, and which does not
        words = ["compare", str(model), "--run", str(run), "--out", str(run.parent / str(number))]
        assert main(words) == 0
        (drawn,) = (run.parent / str(number)).glob("*child*/000.png")
        assert_equal_images(drawn, run / "samples/step-000004/prompt-00.png")


def test_resumed_it_gives_the_same_bits_and_needs_the_same_files(tiny_config: dict, style: Path, capsys) -> None:
    changes = {"name": "child", "model": on_top_of(style, f"{style}@2:-0.5"), "checkpoint": {"every": 2}}
    run = run_with(tiny_config, **changes)
    whole = saved_weights(run, 4)
    shutil.rmtree(checkpoint.checkpoint_folder(run, 4))
    assert run_with(tiny_config, "latest", **changes) == run
    torch.testing.assert_close(saved_weights(run, 4), whole, rtol=0, atol=0)
    with pytest.raises(UserError, match=r"--resume: .*\n  model.loras: "):
        run_with(tiny_config, "latest", **changes | {"model": on_top_of(style)})
    digest = sha256_of(file := style / OUTPUT)
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    words = (
        rf"model.loras: .*style has the SHA-256 {sha256_of(file)}, but .*child was trained on top of style, SHA-256 "
    )
    with pytest.raises(UserError, match=rf"{words}{digest}. Put that file back, or train a new run") as caught:
        run_with(tiny_config, "latest", **changes)
    assert caught.value.code == 2
    capsys.readouterr()
    for verb in (["generate", "--prompt", "a"], ["compare"]):
        assert main([*verb, "--run", str(run)]) == 2
        assert digest in capsys.readouterr().err
    shutil.rmtree(style)
    with pytest.raises(UserError, match=rf"model.loras: .*style does not exist. .*child was .* SHA-256 {digest}"):
        run_with(tiny_config, "latest", **changes)


def test_the_run_names_them(tiny_config: dict, style: Path) -> None:
    changes = {"name": "child", "train": {"steps": 1}, "output": {"report": True}, "model": on_top_of(f"{style}@2:0.5")}
    run = run_with(tiny_config, **changes)
    file = checkpoint.checkpoint_folder(style, 2) / OUTPUT
    about = {"name": "style@2", "sha256": sha256_of(file), "steps": 2, "scale": 0.5}
    assert read_metrics(run)[0]["loss"] != read_metrics(style)[0]["loss"], "the loss of the base without them"
    assert json.loads((run / "stack.json").read_text()) == {"loras": [about]}
    assert json.loads((run / "summary.json").read_text())["on_top_of"] == [about]
    header = read_header(run / OUTPUT)["__metadata__"]
    assert json.loads(header["simpletune_on_top_of"]) == [about]
    words = f"2 steps, strength 0.5, SHA-256 {about['sha256'][:16]}"
    card, report = (run / CARD).read_text(), (run / "report.md").read_text()
    assert f"| on top of | `style@2`, {words} |" in card and words in report and "style@2" in report
    assert "simpletune lora merge style@2:0.5 --base path/to/pipeline --out merged\n" in card
    assert 'TRANSFORMER = "path/to/merged"' in card
    told = header["simpletune_config"] + card  # both are shared
    assert str(style.parent) not in told and '"loras":["style@2:0.5"]' in told
    assert main(["export", str(run), "--format", "kohya", "--out", str(exported := run / "kohya.safetensors")]) == 0
    exported_header = read_header(exported)["__metadata__"]
    assert json.loads(exported_header["simpletune_on_top_of"]) == [about]
    assert "LoRA for pipeline with style@2:0.5, trained" in exported_header["modelspec.description"]
    (run / "stack.json").write_text('{"loras": [{"name": 1}]}')  # what it says is lost, but not the run
    assert run_with(tiny_config, "auto", **changes) == run


def test_files_that_are_refused_before_any_work(tiny_config: dict, style: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("simpletune.training.set_up.encode", None)  # comes later
    tensors = load_file(style / OUTPUT)

    def saved(name: str, changed: dict[str, torch.Tensor]) -> Path:
        save_file(changed, file := tmp_path / f"{name}.safetensors")
        return file

    key = next(name for name in tensors if "lora_A" in name)
    unet = {
        f"lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.{role}.weight": torch.ones(2, 2)
        for role in ("lora_down", "lora_up")
    }
    text = {
        f"lora_te1_text_model_encoder_layers_0_self_attn_q_proj.{role}.weight": torch.ones(2, 2)
        for role in ("lora_down", "lora_up")
    }
    assert main(["export", str(style), "--format", "kohya", "--out", str(tmp_path / "kohya.safetensors")]) == 0
    cases = {
        saved("nan", {**tensors, key: torch.full_like(tensors[key], torch.nan)}): ".* contains NaN or infinite values",
        saved("odd", {"a.b": torch.ones(2)}): r".* is an unknown kind of file \(it contains a.b\)",
        saved("unet", unet): ".*unet.safetensors is for .*, and the base is Stable Diffusion 3. Give a LoRA",
        saved(
            "wide", {**tensors, key: torch.ones(2, 8)}
        ): ".* 8 inputs .*this model has .*. It belongs to another model",
        saved(
            "text", {**load_file(tmp_path / "kohya.safetensors"), **text}
        ): ".*text.safetensors also updates CLIP-L, and "
        "model.loras changes only the transformer. Train on what simpletune lora merge writes: a single file",
        tmp_path / "none": ".*none does not exist. Give a LoRA file",
        f"{style}@3": ".* has no checkpoint of step 3. Use one of 2, 4",
        f"{style}:0": ".*style: a strength of 0 adds nothing. Remove the LoRA",
        f"{style}:high": ".*the strength 'high' is not a number",
        tmp_path / "runs/tiny": ".* lies in .*tiny, which a new run of this name moves aside",
        tiny_config["model"]["pretrained"]: ".* is a full model, not a LoRA",
    }
    shutil.copytree(style, tmp_path / "runs/tiny")
    for named, message in cases.items():
        with pytest.raises(UserError, match=f"^model.loras: {message}"):
            run_with(tiny_config, model=on_top_of(named))
    with pytest.raises(ConfigError, match="model.loras: LoRAs of a trained model do not suit random weights"):
        run_with(tiny_config, model=on_top_of(style, init="random"))


def test_class_pictures_are_of_the_base_with_them(tiny_config: dict, style: Path) -> None:
    prior = {"method": "class_pictures", "prompt": "a disc", "count": 1}
    folders = []
    for loras in ([], [style], [f"{style}:0.5"]):
        config = resolve_folders(validate(merged(tiny_config, model=on_top_of(*loras), prior=prior), "test"))
        folders.append(class_folder(config, class_requests(config, config.prior)))
    assert len(set(folders)) == 3
    run_with(tiny_config, model=on_top_of(style), prior=prior, train={"steps": 1})
    assert [len(list(folder.glob("*.png"))) for folder in folders] == [0, 1, 0]


def test_what_only_plans_names_them_and_does_not_read_them(tiny_config: dict, write_config, capsys) -> None:
    data = merged(tiny_config, model=on_top_of("nothing"))
    prepare_only(validate(data, "test"))
    assert main(["check", str(write_config(data))]) == 0
    assert "pipeline (local folder) with nothing merged in, T5 with 8 tokens\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("levers", [{}, {"memory": {"resident_blocks": 0}}, {"train": {"fsdp": "full"}}], ids=str)
def test_every_process_trains_on_top_of_them(levers: dict, tiny_config: dict, style: Path, launcher: Launcher) -> None:
    shared = {"memory": {"checkpointing": "all"}, "model": on_top_of(f"{style}:30")}
    data = merged(tiny_config, train={"steps": 1, "gradient_accumulation": 2}, **shared)
    data |= {"adapter": {"method": "full"}} if "train" in levers else {}
    several = merged(data, name="several", **levers)
    together(launcher, several)
    runs = run_of(several), run_with(data, name="alone"), run_with(data, name="plain", model=on_top_of())
    found, alone, plain = (read_metrics(run)[0]["loss"] for run in runs)
    assert found == pytest.approx(alone, rel=1e-6) and abs(plain / alone - 1) > 1e-3
