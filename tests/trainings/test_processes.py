"""Several processes that train together: the weights of one, written by the first, stopped and resumed together.

``test_elastic.py`` changes their number."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_sdxl
import torch
import two_processes
from launching import Launcher, free_port
from safetensors import safe_open
from two_processes import LEVERS, changed, require_same, run_of, tensors, together

from simpletune.commands.train.train import train
from simpletune.config.load import validate
from simpletune.data.storage.cache import FileCache, crop_key
from simpletune.runs import checkpoint
from simpletune.runs.control import read_answers
from simpletune.runs.folder import SKIPPED, read_metrics, read_rows
from simpletune.stages.plan_data import make_plan
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.train_step import ignore_frozen_in_ddp

ground, whole = two_processes.ground, two_processes.whole


def alone(data: dict[str, Any]) -> Path:
    """One process that takes what two would, one after the other."""
    return train(validate(changed(data, f"{data['name']}-alone"), "test"))


def test_two_processes_train_what_one_would(whole: tuple[Path, list[str]], ground: dict[str, Any]) -> None:
    run = whole[0]
    one = alone(ground)
    torch.testing.assert_close(tensors(run), tensors(one), rtol=1e-4, atol=1e-6)
    losses = [[row[key] for row in read_metrics(each) for key in ("loss", "grad_norm")] for each in (run, one)]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_processes_train_what_one_would_of_sdxl(launcher: Launcher, ground: dict[str, Any], tmp_path: Path) -> None:
    """With pictures of other sizes, of which the model is told, accumulation and an average."""
    model = {"family": "sdxl", "pretrained": str(tiny_sdxl.build(tmp_path / "sdxl", seed=1))}
    data = changed(ground, "sdxl", data={"resolution": 64, "crop": "random", "flip": True})
    data["model"] = model
    together(launcher, data)
    one, run = alone(data), run_of(data)
    torch.testing.assert_close(tensors(run), tensors(one), rtol=1e-3, atol=1e-5)
    losses = [[row["loss"] for row in read_metrics(each)] for each in (run, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_first_process_writes_and_speaks(whole: tuple[Path, list[str]], ground: dict[str, Any]) -> None:
    run, said = whole
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert [row["step"] for row in read_rows(run / "evaluations.jsonl")] == [0, 2, 4]
    assert sorted(entry.name for entry in run.parent.glob("*whole.*")) == [".whole.lock"]  # nothing was moved aside
    profiles = Path(ground["output"]["profiles"])
    assert len(list((profiles / "whole").rglob("*tfevents*"))) == 1
    for words in ("latents: ", "text  clip_l", "done in"):
        assert words in said[0] and words not in said[1]
    assert "Traceback" not in said[1]
    cache = Path(ground["output"]["cache"])
    assert len(list((cache / "latents").rglob("*.safetensors"))) == 6
    assert not list(run.rglob("*.part")) + list(cache.rglob("*.part"))


def test_killed_and_resumed_together_they_end_as_if_never_killed(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any]
) -> None:
    data = changed(ground, "killed")
    killed = launcher.train(data, data, moments=dict.fromkeys((0, 1), "step.begun:4=kill"))
    assert killed.codes == [-9, -9], killed.said
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [2]
    assert "step 2 of 4" in together(launcher, data, resume="auto")[0]
    require_same(run_of(data), whole[0])
    (checkpoint.checkpoint_folder(run_of(data), 4) / checkpoint.TRAINABLE).write_bytes(b"")
    assert "set aside" in together(launcher, data, resume="auto")[0]
    require_same(run_of(data), whole[0])


@pytest.mark.parametrize(
    "asked, last",
    [
        pytest.param({0: 2, 1: 2}, 3, id="both", marks=pytest.mark.slow),
        pytest.param({1: 2}, 3, id="the second"),
        pytest.param({1: 4}, 4, id="the second, in the last step", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_both_after_the_same_step(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], asked: dict[int, int], last: int
) -> None:
    """One step later than asked: the others learn it with the figures of that step."""
    data = changed(ground, f"stopped-{len(asked)}-{last}", checkpoint={"every": 1000})
    moments = {process: f"step.begun:{step}=term" for process, step in asked.items()}
    stopped = launcher.train(data, data, moments=moments)
    assert stopped.codes == [143, 143], stopped.said
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [last]
    assert f"step {last} of 4 is saved" in stopped.said[0] and "finishes at most two steps and saves" in stopped.said[0]
    assert "is saved" not in stopped.said[1]
    together(launcher, data, resume="auto")
    require_same(run_of(data), whole[0])


def put_request(run: Path, **request: Any) -> None:
    asked = "2999-01-01T00:00:00Z"  # after the next start
    (run / "control.json").write_text(json.dumps({"requests": [{**request, "asked": asked}]}))


def test_requests_are_answered_and_both_stop_after_the_same_step(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any]
) -> None:
    """One step later than read: the other learns of them with the figures of that step."""
    data = changed(ground, "asked", train={"steps": 6})
    launcher.train(data, data, moments=dict.fromkeys((0, 1), "step.begun:4=kill"))
    run = run_of(data)
    put_request(run, id="now", ask="draw", prompt="a red disc", steps=1)
    together(launcher, data, resume="auto")
    torch.testing.assert_close(tensors(run), tensors(whole[0]), rtol=0, atol=0)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    put_request(run, id="enough", ask="stop")
    more = changed(data, "asked", train={"steps": 10})
    stopped = launcher.train(more, more, resume="auto")
    assert stopped.codes == [130, 143], stopped.said
    assert "step 8 of 10 is saved" in stopped.said[0]
    answers = [(row["id"], row["state"], row["step"]) for row in read_answers(run)]
    assert answers == [("now", "done", 4), ("enough", "done", 8)]
    assert checkpoint.list_checkpoints(run)[-1][0] == 8


@pytest.mark.slow
def test_streamed_blocks_and_boundaries_on_the_host_change_nothing(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any]
) -> None:
    data = changed(ground, "streamed", memory=LEVERS)
    together(launcher, data)
    require_same(run_of(data), whole[0])


@pytest.mark.parametrize("weights", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_quantised_bases_and_the_modulation_plan(launcher: Launcher, ground: dict[str, Any], weights: str) -> None:
    precision, memory = {"weights": weights, "compute": "fp32"}, {"modulation": "plan", "modulation_window": 3}
    data = changed(ground, weights, precision=precision, memory=memory | LEVERS)
    said = together(launcher, data)
    assert f"base    {weights} weights cached" in said[0] and "base " not in said[1]
    resident = alone(changed(ground, weights, precision=precision))
    # AdamW makes steps of up to the learning rate, 0.01, of gradients near 0, whose rounding depends on sums' order
    torch.testing.assert_close(tensors(run_of(data)), tensors(resident), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_prior_of_the_bases_predictions(launcher: Launcher, ground: dict[str, Any]) -> None:
    """In the second pass of each process."""
    data = changed(ground, "prior", prior={"method": "base_prediction", "prompt": "a picture"})
    together(launcher, data)
    torch.testing.assert_close(tensors(run_of(data)), tensors(alone(data)), rtol=1e-4, atol=1e-6)


DRAWS = """
import os, sys, time
config, rank, port, of = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.apps.cli.main import main
from simpletune.commands.train import class_pictures
honest = class_pictures.save_png
def save_png(picture, part, request, **more):
    print("drew", request.seed, flush=True)
    if os.environ.get("KILL"):
        if rank == "1":
            open(config + ".drew", "w").close()
            os.kill(os.getpid(), 9)
        while not os.path.exists(config + ".drew"):  # or it might draw all of them before the other one begins
            time.sleep(0.01)
    return honest(picture, part, request, **more)
class_pictures.save_png = save_png
sys.exit(main(["train", config, "--resume", "auto"]))
"""


def drawn(launcher: Launcher, data: dict[str, Any], place: Path, **environment: str) -> list[set[int]]:
    """The seeds of the class pictures that each of two processes draws."""
    (place / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        words = [[str(place / "config.json"), str(rank), port, "2"] for rank in (0, 1)]
        outcome = launcher.programs(DRAWS, *words, environment=environment, limit=0 if environment else 120)
    assert outcome.codes[1] == (-9 if environment else 0), outcome.said
    return [{int(seed) for seed in re.findall(r"^drew (\d+)$", said, re.MULTILINE)} for said in outcome.said]


def test_class_pictures_are_drawn_by_all(launcher: Launcher, ground: dict[str, Any], tmp_path: Path) -> None:
    """Each draws its share and what a killed one had claimed; a picture is the same whoever drew it."""
    prior = {"method": "class_pictures", "prompt": "a picture", "count": 8, "steps": 1}
    data = changed(ground, "class", prior=prior, output={"cache": str(tmp_path / "cache")})
    before = drawn(launcher, data, tmp_path, KILL="1")
    files = {int(file.stem.removeprefix("seed-")) for file in (tmp_path / "cache" / "class").rglob("*.png")}
    # the survivor may draw what the killed one had claimed before it notices the death
    assert before[1] and not before[1] & files - before[0]
    after = drawn(launcher, data, tmp_path)
    assert not after[0] & after[1] and after[0] | after[1] == set(range(8)) - files
    assert not list((tmp_path / "cache" / "class").rglob(".*.part")), "what the killed one was writing"
    one = alone(changed(data, "class", output={"cache": str(tmp_path / "own")}))
    ours, own = (sorted((tmp_path / name / "class").rglob("*.png")) for name in ("cache", "own"))
    assert len(own) == 8 and [file.read_bytes() for file in ours] == [file.read_bytes() for file in own]
    torch.testing.assert_close(tensors(run_of(data)), tensors(one), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_text_side(launcher: Launcher, ground: dict[str, Any]) -> None:
    """Each process has its own encoders; embeddings that stop get no gradient in any."""
    embeddings = {"token": "flat", "initial": "striped", "place": "input", "stop_at": 0.5}
    data = changed(ground, "text", text={"embeddings": embeddings, "lora": {"rank": 2, "learning_rate": 0.001}})
    together(launcher, data)
    found, expected = (
        {name: tensor for name, tensor in tensors(run).items() if not name.startswith(checkpoint.OPTIMIZER)}
        for run in (run_of(data), alone(data))
    )
    assert any("text.embeddings" in name for name in found) and any("text.encoders" in name for name in found)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_in_the_second_process_is_named_by_the_first(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(ground["output"]["cache"], tmp_path / "cache")
    data = changed(ground, "odd", train={"on_nonfinite": "skip"}, output={"cache": str(tmp_path / "cache")})
    config = validate(data, "test")
    plan = make_plan(config, config.data.scan(Path(config.data.path)).pictures)
    views = [plan.micro_batch(0, RankMicroBatches(process, 2).of(plan.areas(0))[0])[0].view for process in (0, 1)]
    for file in (tmp_path / "cache" / "latents").rglob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            key, z_0 = handle.metadata()["key"], handle.get_tensor("z_0")
        if key == crop_key(views[1]):
            FileCache(file.parent).save(key, {"z_0": z_0 * math.nan})
    names = [view.picture.name for view in views]
    said = launcher.train(data, data).said[0]
    assert f"step 1: the loss is nan. Samples: {names[1]}. {names[1]}: its cached latents are non-finite" in said
    assert list(read_rows(run_of(data) / SKIPPED))[0]["samples"] == names


def test_frozen_tensors_are_not_exchanged() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    ignore_frozen_in_ddp(model)
    kept = set(model._ddp_params_and_buffers_to_ignore)  # type: ignore[arg-type]
    assert kept == {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
