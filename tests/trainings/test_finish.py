"""A stopped run is of use: its checkpoints have names, one becomes the result, and as many as wanted are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import failpoints
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from slow_cases import slow_but
from tiny_runs import fail_at, run_with, stop_at

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.estimate.disk_needs import DataCounts, checkpoint_bytes, disk_needs
from simpletune.runs import checkpoint
from simpletune.runs.report import make_report
from simpletune.runs.report.markdown import markdown
from simpletune.stages.plan_data import plan_data
from simpletune.system.locks import exclusive
from simpletune.system.options import ConfigError, UserError
from simpletune.training.finish_early import finish_early

LORA = "pytorch_lora_weights.safetensors"
FULL = "transformer/diffusion_pytorch_model.safetensors"


def stopped(tiny_config: dict, after: int = 4, **changes) -> Path:
    """A run of 9 steps with checkpoints of every second one, that stopped after so many."""
    asked = {"train": {"steps": 9}, "checkpoint": {"every": 2, "keep_last": "all"}, **changes}
    stop_at("step.begun", tiny_config, "int", after, **asked)
    return Path(tiny_config["output"]["runs"]) / "tiny"


METHODS = {
    "lora": {"adapter": {"method": "lora", "rank": 2, "alpha": 3.0}},
    "lora with an average, bf16": {"adapter": {"method": "lora", "rank": 2, "dtype": "bf16"}, "ema": {"decay": 0.8}},
    "lokr with an average": {
        "adapter": {"method": "lokr", "factor": 4, "rank": 1, "dtype": "bf16"}, "ema": {"decay": 0.8},
    },
    "dora": {"adapter": {"method": "dora", "rank": 2, "alpha": 3.0, "max_norm": 0.5}},
    "oft": {"adapter": {"method": "oft", "block_size": 8}},
    "full with an average": {"adapter": {"method": "full"}, "ema": {"decay": 0.8}},
    "partial": {"adapter": {"method": "partial", "layers": ["transformer_blocks.*.attn.*"]}},
}  # fmt: skip


@pytest.mark.parametrize("method", slow_but(["lora", "lokr with an average", "full with an average"], METHODS))
def test_the_result_is_that_of_a_run_of_so_many_steps(method: str, tiny_config: dict) -> None:
    changes = METHODS[method]
    config = {name: value for name, value in tiny_config.items() if name != "adapter"}
    whole = run_with(config, name="whole", train={"steps": 2}, **changes)
    run = stopped(config, after=3, **changes)
    output = finish_early(f"{run}@2")
    file = LORA if changes["adapter"]["method"] in ("lora", "lokr", "dora", "oft") else FULL
    assert output == run / Path(file).parts[0]
    mine, theirs = load_file(run / file), load_file(whole / file)
    assert mine.keys() == theirs.keys() and any(tensor.abs().sum() > 0 for tensor in mine.values())
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name
    if file == FULL:
        assert (run / "transformer/config.json").read_text() == (whole / "transformer/config.json").read_text()
    with safe_open(run / file, "pt") as ours, safe_open(whole / file, "pt") as other:
        assert ours.metadata()["simpletune_step"] == other.metadata()["simpletune_step"] == "2"
        assert str(run.parent) not in ours.metadata()["simpletune_config"]
    places = (str(run.parent.parent), str(Path(tiny_config["model"]["pretrained"]).parent))
    for saved in (whole / "checkpoints").rglob("*.safetensors"):
        with safe_open(saved, "pt") as header:
            told = str(header.metadata())
        assert not any(place in told for place in places), saved


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_text_side_too(adapter: str, tiny_config: dict) -> None:
    """Embeddings in a file of their own, and a LoRA file if anything goes into one."""
    config = {name: value for name, value in tiny_config.items() if name != "adapter"}
    text = {"embeddings": {"token": "flat", "initial": "striped"}, "lora": {"rank": 2} if adapter == "lora" else None}
    changes = {"adapter": {"method": adapter}, "text": text}
    whole = run_with(config, name="whole", train={"steps": 2}, **changes)
    run = stopped(config, after=3, **changes)
    output = finish_early(f"{run}@2")
    files = {path.name.replace("whole", run.name): path for path in whole.glob("*.safetensors")}
    assert output.name == (f"{run.name}_flat.safetensors" if adapter == "none" else LORA) and output.name in files
    assert len(files) == 1 + (adapter == "lora")
    for name, theirs in files.items():
        torch.testing.assert_close(load_file(run / name), load_file(theirs), rtol=0, atol=0)
        with safe_open(run / name, "pt") as ours, safe_open(theirs, "pt") as other:
            mine, expected = ours.metadata(), other.metadata()
        assert mine.keys() == expected.keys() and mine["simpletune_step"] == expected["simpletune_step"] == "2"


def test_finishing_leaves_what_a_finished_run_leaves(
    tiny_config: dict, tiny_images: Path, tmp_path: Path, capsys
) -> None:
    moved = tmp_path / "pictures"
    shutil.copytree(tiny_images, moved)
    looks = {"validation": {"prompts": ["a red disc"], "steps": 1, "every": 2, "loss_samples": 2}}
    data = {"data": {**tiny_config["data"], "path": str(moved)}, "output": {**tiny_config["output"], "report": True}}
    run = stopped({**tiny_config, **data}, **looks)
    assert f"simpletune control {run} --finish" in capsys.readouterr().out
    shutil.rmtree(moved)
    assert main(["control", str(run), "--finish"]) == 0
    said = capsys.readouterr().out
    assert "finished early at step 4 of 9" in said and str(run / LORA) in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished early at step 4 of 9" and summary["complete"]
    assert (summary["steps"], summary["steps_asked"], summary["steps_per_epoch"]) == (4, 9, 6)
    assert summary["eval_loss_after"] != summary["eval_loss_before"] and summary["seconds_per_step"] > 0
    assert summary["trainable_parameters"] < summary["total_parameters"]
    card = (run / "README.md").read_text()
    assert "a red disc" in card and "finished early at step 4 of 9" in card and "pictures | 6 from" in card
    page = (run / "report.md").read_text()
    assert "finished early at step 4 of 9" in page and "4 steps" in page
    with pytest.raises(UserError, match=f"{run} is already finished .finished early at step 4 of 9.*{run}@2"):
        finish_early(str(run))
    assert finish_early(f"{run}@2") == run / LORA
    assert json.loads((run / "summary.json").read_text())["steps"] == 2


def test_a_run_that_was_finished_early_can_train_on(tiny_config: dict, capsys) -> None:
    changes = {"train": {"steps": 9}, "checkpoint": {"every": 2, "keep_last": "all"}}
    whole = run_with(tiny_config, name="whole", **changes)
    run = stopped(tiny_config)
    finish_early(f"{run}@2")
    early = (run / LORA).read_bytes()
    fail_at("step.begun", tiny_config, 2, **changes)
    assert "resume  the run was finished early at step 2 of 9" in capsys.readouterr().out
    assert not (run / "summary.json").exists() and (run / LORA).read_bytes() == early
    run_with(tiny_config, "auto", **changes)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 9 and "status" not in summary
    result, expected = load_file(run / LORA), load_file(whole / LORA)
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())
    with pytest.raises(UserError, match=f"{run} is already finished .9 steps.*result is {run / LORA}.*{run}@2"):
        finish_early(f"{run}@4")


def test_a_run_that_was_finished_and_then_trained_on_can_be_finished_again(tiny_config: dict) -> None:
    changes = {"checkpoint": {"every": 2, "keep_last": "all"}}
    run = run_with(tiny_config, **changes, train={"steps": 2})
    fail_at("step.begun", tiny_config, 3, **changes, train={"steps": 9})
    finish_early(str(run))
    assert json.loads((run / "summary.json").read_text())["steps"] == 4


@pytest.mark.parametrize("method", ["lora", "full with an average"])
def test_a_result_that_is_gone_is_exported_again(method: str, tiny_config: dict, copy_run, capsys) -> None:
    config = {**tiny_config, **METHODS[method]}
    run, name = copy_run(config), FULL if "full" in method else LORA
    result = run / Path(name).parts[0]
    expected, summary = load_file(run / name), json.loads((run / "summary.json").read_text())
    shutil.rmtree(result) if result.is_dir() else result.unlink()
    assert finish_early(str(run)) == result
    torch.testing.assert_close(load_file(run / name), expected, rtol=0, atol=0)
    (run / name).write_bytes((run / name).read_bytes()[:-1])
    run_with(config, "auto")
    assert f"exported the result again from {run}" in capsys.readouterr().out
    torch.testing.assert_close(load_file(run / name), expected, rtol=0, atol=0)
    after = json.loads((run / "summary.json").read_text())
    changing = ("output", "result_sha256")
    assert {**after, **dict.fromkeys(changing)} == {**summary, **dict.fromkeys(changing)}
    with pytest.raises(UserError, match="is already finished"):
        finish_early(str(run))


def test_what_was_finished_at_its_last_step_is_not_exported_again(tiny_config: dict, capsys) -> None:
    fail_at("finish.saved", tiny_config)
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    finish_early(str(run))
    made = (run / LORA).stat().st_mtime_ns
    run_with(tiny_config, "auto")
    assert "is already finished" in capsys.readouterr().out and (run / LORA).stat().st_mtime_ns == made


def test_what_cannot_be_finished(tiny_config: dict, tmp_path: Path, capsys) -> None:
    run = stopped(tiny_config)
    with exclusive(run), pytest.raises(UserError, match="is in use by another run .*stop it, with Ctrl-C: it saves"):
        finish_early(str(run))
    for folder in (run / "checkpoints").iterdir():
        weights = folder / checkpoint.TRAINABLE
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        if folder.name == "step-000004":
            assert finish_early(str(run)) and "step-000004" in capsys.readouterr().out
            with pytest.raises(UserError, match=r"step-000004/trainable.safetensors is damaged$"):
                finish_early(f"{run}@4")
            (run / "summary.json").unlink()
    with pytest.raises(UserError, match="cannot be finished: all of its 2 checkpoints are damaged"):
        finish_early(str(run))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="cannot be finished: it has no checkpoint"):
        finish_early(str(run))
    with pytest.raises(UserError, match=f"^{tmp_path}/nowhere does not exist. Name a run"):
        finish_early(f"{tmp_path}/nowhere")
    assert main(["finish", str(tmp_path)]) == 2 and "has no config.json" in capsys.readouterr().err


def steps_of(run: Path) -> list[int]:
    return [step for step, _ in checkpoint.list_checkpoints(run)]


@pytest.mark.parametrize(
    ("keep", "left", "most"),
    [
        ({"keep_last": 2}, [8, 9], 3),
        ({"keep_last": "all"}, [1, 2, 3, 4, 5, 6, 7, 8, 9], 9),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 9], 4),
        pytest.param({"keep_last": 2, "keep_every": 4}, [4, 8, 9], 4, marks=pytest.mark.slow),
        pytest.param({"keep_last": 20}, [1, 2, 3, 4, 5, 6, 7, 8, 9], 9, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_which_checkpoints_stay_after_a_resume_too_and_the_disk_that_is_asked_for_holds_them(
    keep: dict, left: list[int], most: int, tiny_config: dict
) -> None:
    changes = {"train": {"steps": 9}, "checkpoint": {"every": 1, **keep}}
    config = validate(tiny_config | changes, "test")
    one, run, seen = checkpoint_bytes(config)[0], Path(tiny_config["output"]["runs"]) / "tiny", []

    def asked(**given: Any) -> int:
        return next(size for _, _, size in disk_needs(config, **given)) / one

    assert asked(counts=DataCounts(6, 6, 0, 6)) == most
    last = 9 if len(left) == 9 else keep["keep_last"]
    assert steps_of(stopped(tiny_config, 5, **changes)) == [n for n in range(1, 6) if n in left or n > 5 - last]
    failpoints.watch(lambda moment: seen.append(len(steps_of(run))) if moment == "checkpoint.after-rename" else None)
    run_with(tiny_config, "auto", **changes)
    assert steps_of(run) == left and max(seen) == most
    plan = plan_data(resolve_folders(config)).plan
    assert asked(plan=plan, start=9) == 0
    if len(left) == 9:
        assert asked(plan=plan, start=6) == 3
    older = str(checkpoint.checkpoint_folder(run, left[0]))
    run_with(tiny_config, older, **{**changes, "train": {"steps": left[0] + 1}})
    assert (run / "checkpoints" / f"step-{left[-1]:06d}.superseded").is_dir()


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ({"keep_last": None}, r"checkpoint.keep_last: null does not fit. .*\ball\b"),
        ({"keep_last": 0}, "checkpoint.keep_last: 0 does not fit"),
        ({"every": 2, "keep_every": 3}, "checkpoint.keep_every: 3 is not a multiple of checkpoint.every, 2.*Use 4"),
        ({"every": None, "keep_every": 3}, "checkpoint.keep_every: 3 needs .*Set checkpoint.every"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused(checkpoints: dict, message: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(tiny_config | {"checkpoint": checkpoints}, "test")


def test_the_report_says_which_steps_can_be_used(tiny_config: dict) -> None:
    looks = {"validation": {"prompts": ["a red disc"], "steps": 1, "every": 1, "loss_samples": 0}}
    run = run_with(tiny_config, **looks, train={"steps": 4}, checkpoint={"every": 1, "keep_last": 1, "keep_every": 2})
    page = markdown(make_report([run]))
    section = page.partition("## Checkpoints")[2].partition("\n## ")[0]
    assert [f"tiny@{step}" in section for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert "step 1, 3 " in section and "keep" in section
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "samples")
    assert "## Checkpoints" not in markdown(make_report([run]))
