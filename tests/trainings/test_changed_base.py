"""A run goes on from the base that it began with, wherever that lies, and from no other."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import original_layout
import original_sdxl
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import TrainOnce, merged, run_with, saved_weights

from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.runs.checkpoint_folders import read_state, with_checksum
from simpletune.runs.resume import require_same_base
from simpletune.system.hub import commit_of
from simpletune.system.options import UserError


@pytest.fixture
def pipeline(tiny_pipeline: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_pipeline, tmp_path / "pipeline")


@pytest.fixture
def data(tiny_config: dict, pipeline: Path) -> dict:
    """Two steps on a base of its own."""
    return merged(tiny_config, model={"pretrained": str(pipeline)}, train={"steps": 2})


@pytest.fixture
def stopped(data: dict, tiny_config: dict, copy_run: TrainOnce) -> Path:
    """The run after two steps: as if trained on the copied base, whose contents are those of the fixture's."""
    run = copy_run(merged(tiny_config, train={"steps": 2}))
    set_state(run, config=lambda config: merged(config, model={"pretrained": data["model"]["pretrained"]}))
    return run


def set_state(run: Path, **changes: Callable[[dict], object]) -> None:
    """Change values of the checkpoint's state.json, with its checksum."""
    file = run / "checkpoints/step-000002/state.json"
    state = {name: value for name, value in read_state(file).items() if name != "checksum"}
    file.write_text(with_checksum(state | {name: change(state[name]) for name, change in changes.items()}))


def tensors_changed(file: Path) -> None:
    """Every tensor scaled, in a file of the same size and time."""
    before = file.stat()
    save_file({name: 1.01 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def word_changed(file: Path) -> None:
    """Another value in a JSON file."""
    text = file.read_text()
    changed = re.sub(r'("shift": )[\d.]+', r"\g<1>2.5", text) if "shift" in text else text + " "
    assert changed != text
    file.write_text(changed)


CHANGES = {
    "transformer": ("transformer/diffusion_pytorch_model.safetensors", tensors_changed),
    "vae": ("vae/diffusion_pytorch_model.safetensors", tensors_changed),
    "text_encoder": ("text_encoder/model.safetensors", tensors_changed),
    "text_encoder_3": ("text_encoder_3/model.safetensors", tensors_changed),
    "tokenizer_2": ("tokenizer_2/tokenizer_config.json", word_changed),
    "scheduler": ("scheduler/scheduler_config.json", word_changed),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_part_that_was_replaced_is_refused(part: str, stopped: Path, data: dict, pipeline: Path) -> None:
    file, change = CHANGES[part]
    change(pipeline / file)
    with pytest.raises(UserError, match=rf"(?s)the base has changed since \S+step-000002:\n  {part}: ") as refused:
        run_with(data, "latest", train={"steps": 3})
    said = str(refused.value)
    assert re.search(rf"{part}: \S+ has other contents \(fingerprint \w+ -> \w+\)", said)
    assert said.count("fingerprint") == 1, "parts that are the same are named, too"
    assert "Put the earlier files back, or start a new run under another name" in said


def test_a_base_that_has_moved_goes_on(
    stopped: Path, data: dict, pipeline: Path, tiny_config: dict, train_once: TrainOnce, capsys
) -> None:
    """To the numbers of a run that was never stopped; and it goes on moving, and finished it is finished."""
    whole = train_once(merged(tiny_config, train={"steps": 3}))
    places = [shutil.move(pipeline, pipeline.with_name("moved"))]
    places.append(shutil.copytree(places[0], pipeline.with_name("copied")))
    run = run_with(data, "latest", train={"steps": 3}, model={"pretrained": str(places[0])})
    assert f'changed model.pretrained: "{pipeline}" -> "{places[0]}" (the same contents)' in capsys.readouterr().out
    assert all(map(torch.equal, saved_weights(run, 3).values(), saved_weights(whole, 3).values()))
    run_with(data, "auto", train={"steps": 3}, model={"pretrained": str(places[1])})
    assert "is already finished (3 steps)" in capsys.readouterr().out
    tensors_changed(places[1] / CHANGES["vae"][0])
    for steps in (3, 4):
        with pytest.raises(UserError, match="the base has changed since"):
            run_with(data, "auto", train={"steps": steps}, model={"pretrained": str(places[1])})


def test_a_part_from_elsewhere_with_the_same_contents_goes_on(stopped: Path, data: dict, pipeline: Path) -> None:
    vae = shutil.move(pipeline / "vae", pipeline.with_name("other_vae"))
    run = run_with(data, "latest", train={"steps": 3}, model={"vae": str(vae)})
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_a_checkpoint_that_knows_no_base_goes_on_as_before(stopped: Path, data: dict, pipeline: Path) -> None:
    """Of 0.1.0: its base is known by its name."""
    file = stopped / "checkpoints/step-000002/state.json"
    file.write_text(with_checksum({n: v for n, v in read_state(file).items() if n not in ("checksum", "base")}))
    moved = shutil.copytree(pipeline, pipeline.with_name("moved"))
    with pytest.raises(UserError, match="made with other settings:\n  model.pretrained: "):
        run_with(data, "latest", train={"steps": 3}, model={"pretrained": str(moved)})
    run = run_with(data, "latest", train={"steps": 3})
    assert read_state(run / "checkpoints/step-000003/state.json")["base"]["parts"].keys() >= CHANGES.keys()


def test_a_single_file_that_was_replaced_is_refused(tiny_config: dict, pipeline: Path, tmp_path: Path) -> None:
    file = original_layout.write(pipeline, tmp_path / "file.safetensors", "transformer vae")
    model = {"pretrained": str(file), "text_encoders": str(pipeline)}
    data = merged(tiny_config, model=model, train={"steps": 1})
    run_with(data)
    moved = {**model, "pretrained": str(shutil.copy(file, tmp_path / "moved.safetensors"))}
    run_with(data, "latest", train={"steps": 2}, model=moved)
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("first_stage_model."))
    tensors[name] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"\n  vae: vae in .*has other contents \(fingerprint (?!.*fingerprint)"):
        run_with(data, "latest", train={"steps": 3})


def test_the_marks_of_a_single_file_count(unet_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """An empty tensor says that an SDXL model predicts v: no weight differs."""
    found, folder = [], unet_pipeline("sdxl")
    for marks in ((), ("v_pred",), ("v_pred", "ztsnr")):
        file = original_sdxl.write(folder, tmp_path / "file.safetensors", marks=marks)
        os.utime(file, ns=(0, len(marks) + 1))
        found.append(SDXL(pretrained=str(file), text_encoders=str(folder)).files.fingerprints())
    assert len({each.pop("scheduler") for each in found}) == 3
    assert found[0] == found[1] == found[2] and {"unet", "vae", "text_encoder_2", "tokenizer"} <= found[0].keys()


def test_a_repository_that_moved_on_is_named_with_the_commit_to_return_to() -> None:
    part = SimpleNamespace(place="/hub/models--a--b/snapshots/new/vae", folder=Path("/hub"), file=None)
    config = SimpleNamespace(model=SimpleNamespace(files=SimpleNamespace(part=lambda name: part)))
    saved = SimpleNamespace(folder="step", base={"parts": {"vae": {"fingerprint": "1", "commit": "old"}}, "loras": []})
    base = {"parts": {"vae": {"fingerprint": "2", "commit": "new"}}, "loras": []}
    with pytest.raises(UserError, match="with model.revision=old if they came from there"):
        require_same_base(saved, config, base)  # type: ignore[arg-type]
    same = {"parts": {"vae": {"fingerprint": "1", "commit": "new"}}, "loras": []}
    require_same_base(saved, config, same)  # type: ignore[arg-type]
    assert commit_of(Path(part.place)) == "new" and commit_of(Path("/hub/snapshots/new/vae")) is None
    with pytest.raises(UserError, match="model.loras: other files, .*marks"):
        require_same_base(saved, config, same | {"loras": [["sha", 1.0]]})  # type: ignore[arg-type]


def test_a_lora_under_the_run_may_move_too_and_not_change_its_strength(
    tiny_config: dict, tmp_path: Path, train_once: TrainOnce
) -> None:
    file = train_once(merged(tiny_config, train={"steps": 1})) / "pytorch_lora_weights.safetensors"
    data = merged(tiny_config, model={"loras": [f"{file}:0.5"]}, train={"steps": 1})
    run_with(data)
    moved = str(shutil.copy(file, tmp_path / "moved.safetensors"))
    run = run_with(data, "latest", model={"loras": [f"{moved}:0.5"]}, train={"steps": 2})
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    with pytest.raises(UserError, match="the base has changed since .*\n  model.loras: other files, .*marks"):
        run_with(data, "latest", model={"loras": [f"{moved}:0.6"]}, train={"steps": 3})
