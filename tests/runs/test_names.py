"""What names on a command line stand for: runs, checkpoints (RUN@STEP), LoRAs, strengths; what is said otherwise."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import parsed
from PIL import Image
from recorded_runs import scored
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import Tensor

from simpletune.apps.cli.generate import compare_arguments, generate_arguments
from simpletune.apps.cli.lora import LORA_VERBS
from simpletune.apps.cli.main import VERBS, main
from simpletune.apps.cli.serve import serve_arguments
from simpletune.apps.serve.server import _served_models
from simpletune.commands.generate.compare import models_to_compare
from simpletune.commands.generate.generate import choose_weights, generate
from simpletune.commands.generate.session import open_session
from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.push import files_of
from simpletune.runs.weights import BASE, run_result
from simpletune.runs.weights_names import CheckpointRef, find_lora, find_named, find_run, split_scale, weight_file
from simpletune.system.atomic import remove
from simpletune.system.options import UserError
from simpletune.training.finish_early import finish_early
from simpletune.training.train import train

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def runs(tiny_pipeline: Path, tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``lora`` and ``full`` (with an average), finished, with checkpoints of steps 2 and 4; ``q`` and ``p``: the same,
    stopped."""
    place = tmp_path_factory.mktemp("named")
    for name, again in {"lora": "q", "full": "p"}.items():
        config = {
            "name": name, "device": "cpu", "model": {"pretrained": str(tiny_pipeline), "t5_length": 8},
            "data": {"path": str(tiny_images), "resolution": 32}, "adapter": {"method": name},
            "precision": {"weights": "fp32"}, "optimizer": {"lr": 0.05}, "train": {"steps": 4},
            "memory": {"checkpointing": "none"}, "checkpoint": {"every": 2}, "profile": {"max_traces": 0},
            "validation": {"prompts": ["a disc"], "steps": 1, "loss_samples": 0},
            "output": {"runs": str(place), "profiles": str(place / "t"), "cache": str(place / "c"), "report": False},
            **({"ema": {"decay": 0.5}} if name == "full" else {}),
        }  # fmt: skip
        train(validate(config, "test"))
        shutil.copytree(place / name, place / again)
        for result in ("summary.json", "README.md", LORA, "transformer"):
            remove(place / again / result)
    return place


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the runs, and where commands are called."""
    monkeypatch.chdir(runs)
    return runs


def saved(run: str, step: int) -> Path:
    return checkpoint.checkpoint_folder(Path(run), step)


def test_a_checkpoint_by_its_step(here: Path) -> None:
    assert find_named("q@2").lora == find_named("q/@000002").lora == saved("q", 2) / LORA
    assert find_named("q@latest:0.5").lora == saved("q", 4) / LORA and find_named("q@latest:0.5").scale == 0.5
    assert find_named("p@2").trained == find_named(str(saved("p", 2))).trained == saved("p", 2) / checkpoint.AVERAGE
    assert find_named(f"{saved('q', 2)}").step == 2 and find_named("lora").lora == Path("lora") / LORA
    assert find_run("q@4") == CheckpointRef(Path("q"), 4) and find_run("q") == CheckpointRef(Path("q"), None)


def test_what_exists_and_has_such_a_name_is_itself(here: Path, tmp_path: Path) -> None:
    for name in ("odd@2", "odd:0.8", "odd@2:0.8"):
        (tmp_path / name).mkdir()
        shutil.copy(f"lora/{LORA}", tmp_path / name)
        assert find_named(str(tmp_path / name)).lora == tmp_path / name / LORA
    assert find_named(f"{tmp_path}/odd@2:0.5").scale == 0.5
    assert split_scale("C:here.safetensors") == ("C:here.safetensors", None)


def test_a_checkpoint_that_was_removed_is_said_to_be(tmp_path: Path) -> None:
    data = {"name": "r", "model": {"pretrained": "demo:tiny-sd3"}, "data": {"path": "demo:pictures"}}
    config = validate(data | {"checkpoint": {"every": 50, "keep_last": 2, "keep_every": 200}}, "test")
    (tmp_path / "config.json").write_text(config.model_dump_json(by_alias=True))
    for step in (200, 250, 300):
        checkpoint.checkpoint_folder(tmp_path, step).mkdir(parents=True)
    removed = (
        "has no checkpoint of step {}: it was removed as later ones were saved, because the run keeps its last 2. Use"
    )
    for step, told in (
        (100, removed),
        (150, removed),
        (120, "step {}. Use one of"),
        (350, "step {}. Use one of"),
    ):
        with pytest.raises(UserError, match=f"{told.format(step)}.*200, 250, 300"):
            find_run(f"{tmp_path}@{step}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q@3", "q@3: q has no checkpoint of step 3. Use one of 2, 4"),
        ("q@last", "q@last: 'last' is not a step. Use one of 2, 4"),
        ("q@", "q@: '' is not a step"),
        ("nowhere@3", "nowhere@3: nowhere does not exist"),
        ("c@3", "c@3: c has no checkpoint"),
        ("lora:abc", "lora:abc: .*'abc' is not a number from -1000000 to 1000000. .*lora:0.8"),
        ("lora:1e39", "lora:1e39: .*'1e39' is not a number from -1000000 to 1000000. .*lora:0.8"),
        ("q@2:nan", "q@2:nan: .*'nan' is not a number"),
        ("nowhere", "nowhere does not exist. Give a LoRA file, a run's folder"),
        ("q", "q has no result, .*`.*simpletune control q --finish`, .*: q@4, q@2$"),
        ("c", "c contains neither pytorch_lora_weights.safetensors nor transformer/ nor unet/. Give a LoRA file"),
    ],
)
def test_what_is_not_there_is_said(name: str, message: str, here: Path) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        find_named(name)
    with pytest.raises(UserError, match=f"^--lora: {message}"):
        find_named(name, "--lora: ")


def test_a_name_in_a_local_folder_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="runs/typo does not exist"):
        find_named("runs/typo")


def test_a_full_run_is_no_lora_and_the_message_says_so(here: Path) -> None:
    for name in ("full", "p@2"):
        args = parsed(generate_arguments, "--run", "lora", "--lora", f"{name}:0.5")
        with pytest.raises(UserError, match=f"--lora: {name} is a full run, not a LoRA. Use --run {name}"):
            choose_weights(open_session(args), args)
    with pytest.raises(UserError, match="^full is a full run, not a LoRA. .*simpletune lora extract"):
        main_error("export", "full", "--format", "kohya")
    with pytest.raises(UserError, match="takes no strength. Remove :0.5"):
        find_lora("lora:0.5", strength=False)


def main_error(*words: str) -> None:
    """Run a verb; what it says is raised."""
    from simpletune.apps.cli import main as cli

    args = cli.parse(list(words))
    cli.VERBS[args.verb][0](args)


@pytest.mark.parametrize(
    "words",
    [["generate", "--run", "q"], ["compare", "--run", "q"], ["compare", "q", "--run", "q"],
     ["generate", "--run", "q", "--lora", "q"],
     ["export", "q", "--format", "kohya"], ["merge", "q", "--out", "x"], ["push", "q", "me/q"], ["inspect", "q"],
     ["mix", "q:0.5", "lora:0.5", "--out", "x.safetensors"]],
    ids=" ".join,
)  # fmt: skip
def test_a_run_without_a_result_names_the_ways_to_one(words: list[str], here: Path) -> None:
    with pytest.raises(UserError, match=r"q has no result, .*`.*simpletune control q --finish`.*q@4, q@2") as caught:
        main_error(*words)
    assert ("--lora: " in str(caught.value)) == ("--lora" in words)


@pytest.mark.parametrize("run", ["q", "p"])
def test_the_picture_by_step_is_that_by_path(run: str, here: Path, tmp_path: Path) -> None:
    def drawn(*words: str) -> Image.Image:
        args = parsed(generate_arguments, *words, "--steps", "2", "--output", tmp_path / "drawn.png", "--overwrite")
        image = Image.open(generate(args))
        image.load()  # the file is overwritten
        return image

    named = drawn("--run", f"{run}@2")
    assert named.text["weights"] == {"q": "LoRA q@2 x 1", "p": "p@2"}[run]
    if run == "q":
        assert named.tobytes() == drawn("--run", run, "--lora", str(saved(run, 2))).tobytes()
    last, finished = drawn("--run", f"{run}@4"), drawn("--run", {"q": "lora", "p": "full"}[run])
    assert last.tobytes() == finished.tobytes() != named.tobytes()


def test_compare_takes_steps_and_names_its_columns_by_them(here: Path) -> None:
    def asked(*words: str) -> list:
        args = parsed(compare_arguments, "--run", "lora", *words)
        return models_to_compare(open_session(args), args)

    models = asked("q@2", "q@4:0.5", "p@2", str(saved("p", 2)))
    assert [each.title for each in models] == ["base", "q step 2", "q step 4 x 0.5", "p step 2"]
    assert models[0] == BASE and models[2].scale == 0.5
    assert [each.title for each in asked("q", "--checkpoints")] == ["base", "q step 2", "q step 4"]
    assert [each.title for each in asked("p", "--checkpoints")] == ["base", "p step 2", "p step 4"]
    assert [each.scale for each in asked("--lora", "q@2:0.3", "--lora", "q@2", "--scale", "2")][1:] == [0.3, 2]
    with pytest.raises(UserError, match="p@2:0.5: a full model has no strength. Leave out :0.5"):
        asked("p@2:0.5")
    args = parsed(compare_arguments, "--run", "q@2")
    assert {each.title for each in models_to_compare(open_session(args), args)[1:]} == {"q step 2 x 0.5", "q step 2"}


def test_export_merge_mix_and_inspect_take_steps(here: Path, tmp_path: Path, capsys) -> None:
    assert main(["export", "q@2", "--format", "kohya"]) == 0
    file = Path("q/q-step-2_kohya.safetensors")
    with safe_open(file, "pt") as handle:
        assert handle.metadata()["ss_steps"] == "2"
    assert main(["mix", "q@2:0.7", "q@4:0.5", "--out", str(tmp_path / "mixed.safetensors")]) == 0
    assert "0.7 q-step-2 + 0.5 q-step-4" in capsys.readouterr().out
    assert main(["merge", "q@2:0.5", "--out", str(tmp_path / "merged")]) == 0
    assert main(["inspect", "q@2"]) == main(["inspect", "p@4"]) == main(["inspect", "full"]) == 0
    said = capsys.readouterr().out
    assert str(saved("q", 2) / LORA) in said and str(saved("p", 4) / "ema.safetensors") in said
    assert "full/transformer/diffusion_pytorch_model.safetensors" in said
    file.unlink()


def test_serve_takes_steps(here: Path) -> None:
    parser = argparse.ArgumentParser()
    serve_arguments(parser)
    args = parser.parse_args(["--run", "q@2", "--lora", "last=q@latest", "--device", "cpu"])
    served = _served_models(open_session(args), args.lora)
    assert served.tuned is None
    assert served.loras == {"q-step-2": saved("q", 2) / LORA, "last": saved("q", 4) / LORA}
    tuned = _served_models(open_session(parser.parse_args(["--run", "p@2"])), []).tuned
    assert tuned is not None and (tuned[0], tuned[1].trained) == ("p-step-2", saved("p", 2) / "ema.safetensors")
    with pytest.raises(UserError, match="--lora: p@2 is a full run, not a LoRA. Serve it by --run p@2"):
        _served_models(open_session(args), ["x=p@2"])


def test_a_checkpoint_is_pushed_with_a_card_of_its_own_and_no_local_path(here: Path, runs: Path) -> None:
    files = files_of(find_run("lora@2"), "me/it")
    assert set(files) == {"README.md", LORA, "config.json", "samples/grid.png"}
    content, card = files[LORA], files["README.md"].decode()
    assert isinstance(content, bytes) and str(runs).encode() not in content
    tensors = load_file(saved("lora", 2) / LORA)
    assert all((load(content)[name] == tensor).all() for name, tensor in tensors.items())
    assert re.search(r"\| steps \| 2 .*finished early at step 2 of 4", card) and 'RESULT = "me/it"' in card
    with pytest.raises(UserError, match="full@2 is a checkpoint of a full run.*Finish the run"):
        files_of(find_run("full@2"), "me/it")


def test_names_import_no_torch() -> None:
    code = (
        "import sys, simpletune.runs.weights_names, simpletune.runs.report.single_run; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_option_that_was_not_given_is_not_named(here: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    args = parsed(generate_arguments, "--model", tiny_pipeline)
    with pytest.raises(UserError, match="^neither a run nor a LoRA is named"):
        choose_weights(open_session(args), args)
    with pytest.raises(UserError, match="^--run: q@3: q has no checkpoint of step 3. Use one of 2, 4"):
        open_session(parsed(generate_arguments, "--run", "q@3"))
    with pytest.raises(UserError, match="^push: nowhere does not exist"):
        files_of(find_run("nowhere"), "me/it")
    shutil.copytree("q", tmp_path / "q")
    with pytest.raises(UserError, match=f"no finished run. .*--run {tmp_path}/q@4$"):
        open_session(parsed(generate_arguments, "--runs", tmp_path))
    assert (
        run_result(Path("q"), 0.5, 2).scale == 0.5 and json.loads(Path("q/config.json").read_text())["name"] == "lora"
    )
    assert weight_file("p@2") == saved("p", 2) / "ema.safetensors"


# RUN@best

WHOLE_RUN = {  # verbs that take a run, or a model, as a whole: how they say so
    "evaluate": ([], "b@best: all checkpoints of a run are evaluated together. Name the run: b"),
    "report": ([], "b@best is not a folder. Name a run's folder"),
    "control": (["--save", "--wait", "0"], "b@best is not training"),
    "lora extract": (["b@best", "--rank", "1", "--out", "x.safetensors"], "b@best has no transformer/ folder"),
}
NO_RUN = {  # verbs that take a configuration or pictures
    "caption", "check", "data", "doctor", "estimate", "import", "init", "plan", "train", "web",
}  # fmt: skip


@pytest.fixture(params=[1, 0.8], ids=["chosen", "chosen at 0.8"])
def best(request: pytest.FixtureRequest, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """The strength at which step 2 of the stopped run ``b`` is the best of 2 and 4."""
    shutil.copytree(runs / "q", tmp_path / "b")
    scored(tmp_path / "b", [(None, None, 0.1, 0, 0), (2, request.param, 0.9, 0.01, 0.01), (4, 1, 0.5, 0.01, 0.01)])
    monkeypatch.chdir(tmp_path)
    return request.param


def drawn_by(*words: str) -> bytes:
    args = parsed(generate_arguments, *words, "--steps", "2", "--output", "drawn.png", "--overwrite")
    return Image.open(generate(args)).tobytes()


def columns_of(*words: str) -> list[tuple[Path | None, float]]:
    args = parsed(compare_arguments, *words)
    return [(each.lora, each.scale) for each in models_to_compare(open_session(args), args)]


def values_of(tensors: dict[str, Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def tensors_by(*words: str) -> dict[str, list]:
    """The tensors of the file that a verb writes."""
    main_error(*words, "--out", "x.safetensors", "--overwrite")
    return values_of(load_file("x.safetensors"))


def served_by(*words: str) -> dict[str, Path]:
    parser = argparse.ArgumentParser()
    serve_arguments(parser)
    args = parser.parse_args([*words, "--device", "cpu"])
    return _served_models(open_session(args), args.lora).loras


def test_every_verb_is_one_that_is_tried_with_the_best() -> None:
    tried = {"generate", "compare", "serve", "push"} | {f"lora {verb}" for verb in LORA_VERBS}
    assert tried | set(WHOLE_RUN) | NO_RUN | {"lora"} == set(VERBS) | {f"lora {verb}" for verb in LORA_VERBS}


@pytest.mark.parametrize("best", [0.8], indirect=True)
def test_what_can_apply_a_strength_uses_the_best_checkpoint_at_its_own(best: float) -> None:
    two, four = (saved("b", step) / LORA for step in (2, 4))
    for kind in ([], ["--full"]):
        drawn = drawn_by("--run", "b@best", *kind)
        assert drawn == drawn_by("--run", "b@2", "--scale", str(best), *kind) != drawn_by("--run", "b@4", *kind)
    assert drawn_by("--run", "b@4", "--lora", "b@best") == drawn_by("--run", "b@2", "--scale", str(best))
    assert drawn_by("--run", "b@best", "--scale", "0.5") == drawn_by("--run", "b@2", "--scale", "0.5")
    assert columns_of("--run", "b@4", "b@best") == [(None, 1), (two, best)]
    assert columns_of("--run", "b@best")[1:] == [(two, best)]
    assert columns_of("--run", "b@best", "--scale", "2")[1:] == [(two, 2)]
    for words in (["merge"], ["mix", "b@4:0.5"]):
        made, named = (tensors_by(*words, name) for name in ("b@best", f"b@2:{best}"))
        assert made == named != tensors_by(*words, "b@4")
    assert find_named("b@best:0.5").scale == 0.5 and find_named("b@best").lora == two != four


def test_what_takes_no_strength_uses_the_best_checkpoint_or_names_it(best: float, capsys) -> None:
    def described(name: str) -> str:
        assert main(["inspect", name]) == 0
        return capsys.readouterr().out

    assert described("b@best") == described("b@2") != described("b@4")
    scales = [scale for _, scale in columns_of("--run", "b@best")[1:]]
    assert scales == ([0.5, 1] if best == 1 else [best])
    calls: list[Callable[[str], object]] = [
        lambda name: list(served_by("--run", name).values()),
        lambda name: served_by("--run", "b@4", "--lora", f"x={name}")["x"],
        lambda name: values_of(load(files_of(find_run(name), "me/b")[LORA])),  # type: ignore[arg-type]
        lambda name: tensors_by("export", name, "--format", "kohya"),
        lambda name: tensors_by("resize", name, "--rank", "1"),
        lambda name: values_of(load_file(finish_early(name))),
    ]
    for call in calls:
        if best == 1:
            assert call("b@best") == call("b@2") != call("b@4")
            continue
        with pytest.raises(UserError, match="b@best is b@2 at a strength of 0.8, and .* takes no strength. Name b@2$"):
            call("b@best")


@pytest.mark.parametrize("verb", WHOLE_RUN)
def test_what_takes_a_whole_run_refuses_the_best_checkpoint(verb: str, best: float, capsys) -> None:
    more, said = WHOLE_RUN[verb]
    assert main([*verb.split(), "b@best", *more]) == 2
    assert f"error: {said}" in capsys.readouterr().err
    assert main(["evaluate", "b@best", "--choose", "4"]) == 2
    assert "b@best: --choose names the checkpoint. Name the run: b" in capsys.readouterr().err
