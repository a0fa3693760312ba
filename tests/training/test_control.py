"""The control file: what is drawn, saved and stopped between two steps, and that the run ends in the same bits."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import failpoints
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter
from tiny_runs import TrainOnce, run_with, saved_weights

from simpletune.adapters.methods import Adapter
from simpletune.adapters.methods.layers import at_strength
from simpletune.apps.cli.control import wait_for_answer
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.engine.fp16_blocks import Fp16Blocks
from simpletune.estimate import generate_memory as predicted
from simpletune.estimate.job_estimate import needed_bytes
from simpletune.runs import checkpoint
from simpletune.runs.control import (
    GenerateRequest,
    SaveRequest,
    StopRequest,
    ask,
    read_answers,
    read_generated,
    read_requests,
)
from simpletune.runs.folder import read_metrics
from simpletune.stages.png import generation_parameters
from simpletune.stages.sample import ImageRequest
from simpletune.system import signals
from simpletune.system.gpus import Card
from simpletune.system.options import Json, UserError
from simpletune.training import interrupts, requested_images


def folder_of(tiny_config: dict) -> Path:
    return Path(tiny_config["output"]["runs"]) / tiny_config["name"]


def in_step(count: int, action: Callable[[], object]) -> None:
    """Do something while a step is computed."""
    failpoints.arm("step.begun", action, count)


def asking(tiny_config: dict, *requests: interrupts.AnyRequest) -> Callable[[], None]:
    return lambda: [ask(folder_of(tiny_config), request) for request in requests] and None


def run_to_its_end(tiny_config: dict) -> None:
    """Train, or go on; a stop by a request, which pytest would take for its own, is a failure."""
    try:
        run_with(tiny_config, "auto")
    except signals.Stopped as stopped:
        pytest.fail(str(stopped))


def losses(run: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(run)]


def answers(run: Path) -> dict[str, dict]:
    found = read_answers(run)
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def test_pictures_and_checkpoints_on_request_leave_the_run_in_the_same_bits(
    tiny_config: dict, train_once: TrainOnce
) -> None:
    tiny_config |= {"adapter": {"rank": 2, "dropout": 0.5}, "ema": {"decay": 0.9}, "checkpoint": {"every": None}}
    plain = train_once(copy.deepcopy(tiny_config))
    new_prompt, known = f"a prompt that nobody encoded {time.time()}", "a red disc"
    one = GenerateRequest(id="one", prompt=new_prompt, steps=2, seed=7, negative_prompt="blue")
    half = GenerateRequest(id="half", prompt=known, steps=2, strength=0.5, width=16)
    in_step(2, asking(tiny_config, one, half, SaveRequest(id="save", ask="save")))
    run = run_with(tiny_config)
    assert losses(run) == losses(plain)
    torch.testing.assert_close(saved_weights(run, 4), saved_weights(plain, 4), rtol=0, atol=0)
    result = "pytorch_lora_weights.safetensors"
    assert checkpoint.list_checkpoints(run)[0][0] == 2
    ours, theirs = ((place / "checkpoints/step-000004/optimizer.safetensors").read_bytes() for place in (run, plain))
    assert ours == theirs
    assert tensors_of(run / result) == tensors_of(plain / result)

    found = answers(run)
    assert [(row["state"], row["step"]) for row in found.values()] == [("done", 2)] * 3
    assert found["save"]["file"] == "checkpoints/step-000002"
    rows = {row["id"]: row for row in read_generated(run)}
    assert rows["one"]["prompt"] == new_prompt and rows["one"]["seed"] == 7 and rows["one"]["step"] == 2
    assert rows["half"]["strength"] == 0.5 and rows["half"]["width"] == 16 and rows["half"]["height"] == 32
    told = generation_parameters(run / rows["one"]["file"])
    assert (told["prompt"], told["negative_prompt"], told["weights"]) == (new_prompt, "blue", "step 2")
    assert Image.open(run / rows["half"]["file"]).size == (16, 32)


def tensors_of(file: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_strength_scales_the_update_and_leaves_no_trace(kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    method = TypeAdapter(Adapter).validate_python({"method": kind, "rank": 2, "targets": ["0"], "alpha": 3.0})
    method.attach(model, seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    x = torch.randn(4, 3)
    with torch.no_grad():
        full = model(x)
        with at_strength(model, 0.0):
            base = model(x)
        with at_strength(model, 0.25):
            quarter = model(x)
        assert torch.equal(model(x), full) and not torch.allclose(full, base)
    torch.testing.assert_close(quarter, base + 0.25 * (full - base))


def test_a_picture_on_request_is_the_one_of_validation(tiny_config: dict) -> None:
    tiny_config["validation"] = {"prompts": ["a red disc"], "every": 2, "steps": 2, "seed": 5, "loss_samples": 0}
    tiny_config["ema"] = {"decay": 0.1}
    same = {"prompt": "a red disc", "seed": 5}
    in_step(
        2, asking(tiny_config, GenerateRequest(id="now", **same), GenerateRequest(id="without", strength=0.0, **same))
    )
    run = run_with(tiny_config)
    files = {row["id"]: run / row["file"] for row in read_generated(run)}
    for name, state in (("now", "step-000002"), ("without", "base")):
        validated = Image.open(run / "samples" / state / "prompt-00.png")
        assert Image.open(files[name]).tobytes() == validated.tobytes(), name


def test_stop_saves_and_one_command_continues_in_the_same_bits(
    tiny_config: dict, train_once: TrainOnce, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train_once(copy.deepcopy(tiny_config))
    draw = GenerateRequest(id="late", prompt="a red disc")
    in_step(2, asking(tiny_config, StopRequest(id="enough", ask="stop"), draw))
    with pytest.raises(signals.Stopped, match="stopped by a request") as caught:
        run_with(tiny_config, "auto")
    assert caught.value.code == 130
    run = folder_of(tiny_config)
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [2] and len(read_metrics(run)) == 2
    (attempt,) = json.loads((run / "attempts.json").read_text())
    assert (attempt["ended"], attempt["reason"], attempt["last_step"]) == ("stopped", "a request", 2)
    found = answers(run)
    assert found["enough"]["state"] == "done" and found["enough"]["file"] == "checkpoints/step-000002"
    assert found["late"]["state"] == "refused" and f"generate --run {run}@2" in found["late"]["why"]
    assert "step 2 of 4 is saved" in capsys.readouterr().out
    run_to_its_end(tiny_config)  # the request stays in the file, but is answered
    assert losses(run) == losses(plain)
    torch.testing.assert_close(saved_weights(run, 4), saved_weights(plain, 4), rtol=0, atol=0)
    assert len(read_answers(run)) == 2


def test_what_is_asked_too_late_or_before_the_start_is_refused(tiny_config: dict) -> None:
    run = folder_of(tiny_config)
    old = {"id": "old", "ask": "stop", "asked": (datetime.now(UTC) - timedelta(hours=1)).isoformat()}
    in_step(1, lambda: (run / "control.json").write_text(json.dumps({"requests": [old]})))
    in_step_four = asking(tiny_config, StopRequest(id="late", ask="stop"), GenerateRequest(id="too", prompt="x"))
    failpoints.arm("finish.saved", in_step_four)
    run_to_its_end(tiny_config)
    found = answers(run)
    assert found["old"]["state"] == "refused" and "before this start" in found["old"]["why"]
    assert found["late"]["state"] == found["too"]["state"] == "refused"
    assert "training has ended" in found["too"]["why"] and len(read_metrics(run)) == 4
    with pytest.raises(UserError, match="is not training, so nothing would answer"):
        ask(run, SaveRequest(id="after", ask="save"))


def test_a_picture_does_not_decide_which_blocks_later_evaluations_compute_in_fp32() -> None:
    model, blocks = torch.nn.Linear(1, 1), Fp16Blocks.__new__(Fp16Blocks)
    model.__dict__["fp16_blocks"], blocks.wide_in_generation = blocks, frozenset({3})
    with requested_images.restore_fp16_blocks(model):
        blocks.wide_in_generation = frozenset({3, 7})
    assert blocks.wide_in_generation == {3}


BROKEN = {
    "not json": "{",
    "a list": "[]",
    "an unknown request": '{"requests": [{"id": "a", "ask": "explode"}]}',
    "an unknown field": '{"requests": [{"id": "a", "ask": "save", "path": "/etc"}]}',
    "a path as its name": '{"requests": [{"id": "../../a", "ask": "save"}]}',
    "text for a number": '{"requests": [{"id": "a", "ask": "draw", "prompt": "x", "seed": "7"}]}',
    "a lone surrogate": '{"requests": [{"id": "a", "ask": "draw", "prompt": "\\ud800"}]}',
    "a key twice": '{"requests": [], "requests": []}',
    "too many": json.dumps({"requests": [{"id": f"a{number}", "ask": "save"} for number in range(65)]}),
    "endless": '{"requests": ' + "[" * 5000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "control.json").write_text(text)
    with pytest.raises(UserError, match=r"control\.json"):
        read_requests(tmp_path)


def test_a_broken_file_is_set_aside_with_a_warning_and_the_run_goes_on(tiny_config: dict) -> None:
    file = folder_of(tiny_config) / "control.json"

    def damage() -> None:
        file.write_text('{"requests": [{"id": "a", "ask": "explode"}]}')
        os.utime(file, (time.time() - 10,) * 2)

    in_step(2, damage)
    run = run_with(tiny_config)
    assert (run / "control.json.damaged").exists() and not file.exists()
    (warning,) = json.loads((run / "summary.json").read_text())["warnings"]
    assert "requests.0.ask" in warning and "explode" in warning and "set aside as control.json.damaged" in warning
    assert len(read_metrics(run)) == 4 and read_answers(run) == []


def test_a_file_that_is_being_written_is_read_when_it_is_whole(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "SETTLED", 600.0)
    file, whole = folder_of(tiny_config) / "control.json", json.dumps({"requests": [{"id": "a", "ask": "save"}]})

    def write_in_two() -> None:
        file.write_text(whole[:20])
        failpoints.arm("step.begun", lambda: file.write_text(whole))

    in_step(2, write_in_two)
    run = run_with(tiny_config)
    assert answers(run)["a"]["step"] == 3 and not (run / "control.json.damaged").exists()


def test_what_cannot_be_drawn_is_refused_with_its_reason(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = requested_images.ImageRequest

    def request(prompt: str, *rest: object) -> ImageRequest:
        if prompt == "breaks":
            raise RuntimeError("the autoencoder broke")
        return honest(prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(requested_images, "ImageRequest", request)
    large, breaks = (
        GenerateRequest(id="large", prompt="x", width=4096),
        GenerateRequest(id="breaks", prompt="breaks", steps=1),
    )
    in_step(2, asking(tiny_config, large, breaks))
    run = run_with(tiny_config)
    found = answers(run)
    assert found["large"]["state"] == "refused"
    assert "4096x32: this run holds positions for" in found["large"]["why"]
    assert found["breaks"]["state"] == "failed" and "the autoencoder broke" in found["breaks"]["why"]
    assert len(read_metrics(run)) == 4 and not (run / "drawn").exists()


def test_full_fine_tuning_has_no_strength(tiny_config: dict) -> None:
    tiny_config["adapter"] = {"method": "full"}
    in_step(2, asking(tiny_config, GenerateRequest(id="half", prompt="x", strength=0.5)))
    assert "has no strength" in answers(run_with(tiny_config))["half"]["why"]


def test_a_picture_that_is_predicted_not_to_fit_is_refused(tiny_config: dict, monkeypatch, tmp_path: Path) -> None:
    tiny_config["output"]["cache"] = str(tmp_path)
    config = validate(tiny_config, "tiny")
    asked = GenerateRequest(id="now", prompt="a red disc", steps=2)
    config = config.model_copy(update={"validation": requested_images.validation_for(config, asked)})

    def card(size: int) -> None:
        found = Card("Small", size / 2**30, (8, 9), found=1.0), 0
        monkeypatch.setattr(predicted, "card_at_hand", lambda device: found)

    def require(encodes: bool = False) -> None:
        predicted.require_memory(config, torch.device("cuda"), (32, 32), None, encodes)

    card(2**34)
    require(encodes=True)
    estimate = predicted.estimate(predicted.simulated_config(config), (8, 9), (32, 32))
    card(needed_bytes(estimate.stages["validate"].bytes))
    require()
    card(needed_bytes(estimate.stages["validate"].bytes) - 1)
    with pytest.raises(UserError, match=r"drawing at 32x32 beside training needs .* MiB \(predicted\) and Small has"):
        require()


def test_the_run_s_own_prediction_serves_for_pictures_like_those_of_its_validation(tiny_config: dict) -> None:
    tiny_config["validation"] = {"prompts": ["x"], "steps": 2}
    config = validate(tiny_config, "tiny")
    for changes, alike in (({}, True), ({"seed": 9}, True), ({"width": 16}, False), ({"steps": 3}, False)):
        asked = GenerateRequest(id="now", prompt="another", **changes)
        assert requested_images.has_predicted_peak(config, requested_images.validation_for(config, asked)) is alike
    tiny_config["validation"]["prompts"] = []
    config = validate(tiny_config, "tiny")
    assert not requested_images.has_predicted_peak(config, config.validation)


def test_looking_costs_little_and_reads_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = interrupts.Interrupts(tmp_path, alone=True)
    reads = []
    monkeypatch.setattr(interrupts, "read_requests", lambda folder: reads.append(folder) or [])
    for _ in range(3):
        watched.poll()
    assert reads == []
    (tmp_path / "control.json").write_text('{"requests": []}')
    for _ in range(3):
        watched.poll()
    assert len(reads) == 1


def test_every_member_is_answered_once_and_waiting_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpletune.runs.control.is_held", lambda folder: True)
    for number in range(3):
        ask(tmp_path, SaveRequest(id=f"s{number}", ask="save"))
    (tmp_path / "control_answers.jsonl").write_text('{"id": "s1", "step": 1, "state": "done"}\n{"broken\n')
    ask(tmp_path, GenerateRequest(id="d", prompt='</script> "quoted" \n \x1b'))
    assert [request.id for request in read_requests(tmp_path)] == ["s0", "s2", "d"]
    (tmp_path / "control.json").write_text("{")
    ask(tmp_path, SaveRequest(id="new", ask="save"))
    assert [request.id for request in read_requests(tmp_path)] == ["new"]
    assert (tmp_path / "control.json.damaged").read_text() == "{"


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ({"state": "done", "step": 3, "file": "checkpoints/step-000003"}, 0, "checkpoints/step-000003"),
        ({"state": "failed", "step": 3, "why": "the disk is full"}, 2, "failed at step 3: the disk is full"),
        (None, 2, "no answer within 0.05 s"),
    ],
)
def test_the_command_waits_for_the_answer(
    answer: Json | None, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("simpletune.runs.control.ask", lambda run, request: asked.append(request.id))
    monkeypatch.setattr("simpletune.system.locks.is_held", lambda run: True)
    answers = lambda run: [] if answer is None else [{"id": "other"}, {"id": asked[0], **answer}]  # noqa: E731
    monkeypatch.setattr("simpletune.runs.control.read_answers", answers)
    assert main(["control", str(tmp_path), "--save", "--wait", "0.05"]) == code
    said = capsys.readouterr()
    assert words in (said.err if code else said.out) and len(asked) == 1


def test_the_command_asks_and_prints_the_answer(tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run, codes = folder_of(tiny_config), []
    monkeypatch.setattr("simpletune.apps.cli.control.LOOK_EVERY", 0.0)

    def type_commands() -> None:
        for words in (["--save", "--wait", "0"], ["--draw", "x", "--strength", "9"], ["--save", "--seed", "1"]):
            codes.append(main(["control", str(run), *words]))

    in_step(2, type_commands)
    run_with(tiny_config)
    said = capsys.readouterr()
    assert codes == [0, 2, 2] and "at step 2: done checkpoints/step-000002" in said.out
    assert "strength: 9.0 does not fit. It must be at most 4" in said.err
    assert "--seed belongs to --draw. Leave it out" in said.err
    (answer,) = read_answers(run)
    assert wait_for_answer(run, answer["id"], 1)["state"] == "done"
    with pytest.raises(UserError, match="has ended without an answer"):
        wait_for_answer(run, "another", 1)
