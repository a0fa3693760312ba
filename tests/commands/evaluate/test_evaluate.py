"""``simpletune evaluate``: what it draws, scores and writes, and what a stopped call leaves."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reference import scores as reference
from tiny_encoders import write_clip, write_dino
from tiny_runs import TrainOnce

from simpletune.apps.cli.evaluate import evaluate_arguments
from simpletune.apps.cli.main import main
from simpletune.commands.evaluate import evaluate as command
from simpletune.commands.evaluate import predict_stages
from simpletune.commands.evaluate.encoders import find_encoder
from simpletune.commands.evaluate.evaluate import evaluate, plan_of
from simpletune.commands.evaluate.missing_images import Gallery
from simpletune.commands.evaluate.plan import EvaluationPlan, evaluated_weights, identity, shots_of
from simpletune.commands.evaluate.predict_stages import estimate_stages, speeds_at_hand
from simpletune.commands.evaluate.prompt_sets import Prompt
from simpletune.commands.generate.session import GenerationSession
from simpletune.runs.folder import read_scores
from simpletune.stages.sample import ImageRequest, Sampler
from simpletune.system.gpus import Card
from simpletune.system.options import UserError

PROMPTS = ["a large red zorp on the left", "a small blue zorp", "a green star"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("encoders")
    return [str(write_dino(place / "eye")), str(write_clip(place / "reader"))]


@pytest.fixture
def run(tiny_config: dict, copy_run: TrainOnce) -> Path:
    """A LoRA of two checkpoints."""
    tiny_config["checkpoint"] = {"every": 2}
    tiny_config["validation"] = {"prompts": PROMPTS, "every": None, "steps": 2, "guidance": 2.0, "loss_samples": 0}
    tiny_config["validation"] |= {"width": 32, "height": 32}
    return copy_run(tiny_config)


class Counted:
    """A CPU that takes a millisecond for each operation, whatever it computes."""

    cuda = False
    rates: dict = {}
    launch = 0.0

    def seconds(self, kind: str, dtype: str, extents: tuple[int, ...]) -> float:
        return 0.0

    def host(self, what: str) -> float:
        return 1e-3 if what == "operation" else 0.0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction does not measure this CPU."""
    monkeypatch.setattr(predict_stages, "speeds_at_hand", lambda cache, card: (Counted(), "counted"))


def parsed(run: Path, *words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    evaluate_arguments(parser)
    return parser.parse_args([str(run), "--device", "cpu", "--token", "zorp", *(str(word) for word in words)])


def planned(run: Path, *words: object) -> tuple[GenerationSession, EvaluationPlan]:
    args = parsed(run, *words)
    args.run, args.runs, args.model, args.no_t5 = run, None, None, None
    session = command.open_session(args)
    return session, plan_of(session, args)


def table(run: Path) -> dict:
    result = read_scores(run)
    assert result is not None
    return {name: value for name, value in result.items() if name != "cost"}


def test_every_point_has_every_score_and_they_are_the_references(
    run: Path, encoders: list[str], unpredicted: None, tiny_images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(parsed(run, "--encoders", *encoders, "--strengths", 0.5)) == run / "evaluation.json"
    result = table(run)
    said = capsys.readouterr().out
    assert [each["title"] for each in result["points"]] == ["base", "step 2 x 0.5", "step 4 x 0.5"]
    assert result["prompts"]["scored"] == ["a large red on the left", "a small blue", "a green star"]
    assert result["main"] == {"subject_fidelity": "eye", "prompt_fidelity": "reader"}
    assert result["real"] == {"pictures": 6, "of": 6}
    eye, reader = (find_encoder(name).load(torch.device("cpu")) for name in encoders)
    real = [Image.open(file) for file in sorted(tiny_images.glob("*.png"))]
    for point in result["points"]:
        drawn = [Image.open(run / name) for name in point["pictures"]]
        assert len(drawn) == 6 and drawn[0].size == (32, 32)
        found = point["scores"]
        for encoder in (eye, reader):
            title, (generated, of_real) = encoder.about.title, map(encoder.embed_images, (drawn, real))
            own, theirs = generated[:4].tolist(), of_real.tolist()  # the third prompt has no token
            expected = {
                "subject_fidelity": reference.mean_of_pairs(own, theirs),
                "diversity": np.mean([reference.diversity(generated[n : n + 2].tolist()) for n in (0, 2, 4)]),
                "copying": reference.share_copied(own, theirs),
                "kid": reference.kid(own, theirs),
                "cmmd": reference.cmmd(own, theirs),
            }
            assert {score: found[score][title]["value"] for score in expected} == pytest.approx(expected, abs=2e-6)
        texts = reader.embed_prompts([result["prompts"]["scored"][n // 2] for n in range(6)])
        fits = reference.mean_of_matches(reader.embed_images(drawn).tolist(), texts.tolist())
        assert found["prompt_fidelity"]["reader"]["value"] == pytest.approx(fits, abs=2e-6)
        assert list(found["prompt_fidelity"]) == ["reader"]
        by_eye = {score: value["eye"] for score, value in found.items() if "eye" in value}
        counts = {score: (value["n"], value["prompts"]) for score, value in by_eye.items()}
        assert counts == {
            "subject_fidelity": (4, 2), "diversity": (6, 3), "pres": (2, 2), "nearest": (4, 2), "copying": (4, 2),
            "cmmd": (4, 2), "kid": (4, 2),
        }  # fmt: skip
    assert "from_base" not in result["points"][0]["scores"]["diversity"]["eye"]
    last, first = (result["points"][n]["scores"]["prompt_fidelity"]["reader"] for n in (-1, 0))
    assert last["from_base"]["value"] == pytest.approx(last["value"] - first["value"], abs=2e-6)
    assert last["from_base"]["low"] is last["from_base"]["high"] is None and last["from_base"]["error"] > 0  # 3 prompts
    assert "evaluate 3 models x 8 pictures (the run's prompts), 24 to draw" in said
    assert "eye (dino), the run's prompts" in said


def test_pres_is_drawn_without_the_token_from_the_noise_of_the_subject() -> None:
    prompts = [Prompt("a zorp dog", "a dog"), Prompt("a cat", "a cat"), Prompt("a zorp dog in snow", "a dog in snow")]
    shots = shots_of(ImageRequest("", 100), prompts, 2)
    assert [(shot.request.prompt, shot.request.seed) for shot in shots if not shot.of_class] == [
        ("a zorp dog", 100), ("a zorp dog", 101), ("a cat", 102), ("a cat", 103), ("a zorp dog in snow", 104),
        ("a zorp dog in snow", 105),
    ]  # fmt: skip
    others = [(shot.request.prompt, shot.request.seed) for shot in shots if shot.of_class]
    assert others == [("a dog", 100), ("a dog in snow", 104)]


@pytest.fixture
def unpredicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the prediction, which takes longer than all else."""
    monkeypatch.setattr(command, "estimate_stages", lambda *_: {})


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch, unpredicted: None) -> Iterator[list[int]]:
    """Drawing and embedding stop after as many pictures as the list's two numbers say; negative: never."""
    left = [-1, -1]

    def counting(owner: type, name: str, which: int) -> None:
        honest = getattr(owner, name)

        def stopping(self: object, *args: object) -> object:
            if left[which] == 0:
                raise KeyboardInterrupt
            left[which] -= 1
            return honest(self, *args)

        monkeypatch.setattr(owner, name, stopping)

    from simpletune.commands.evaluate.encoders import ImageEncoder

    counting(Sampler, "latents", 0)
    counting(ImageEncoder, "embed_images", 1)
    yield left


@pytest.mark.parametrize(
    "more", [pytest.param((), id="alone"), pytest.param(("--batch-size", 2), id="in pairs", marks=pytest.mark.slow)]
)
def test_a_stopped_evaluation_goes_on_and_gives_the_same_table(
    more: tuple, run: Path, encoders: list[str], stops: list[int], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    words = ("--encoders", *encoders, "--seeds", 1, *more)
    evaluate(parsed(whole, *words))
    for stop in ([3, -1], [2, -1], [-1, 5]):
        stops[:] = stop
        with pytest.raises(KeyboardInterrupt):
            evaluate(parsed(run, *words))
        assert not (run / "evaluation.json").exists()
    stops[:] = [-1, -1]
    evaluate(parsed(run, *words))
    assert stops == [-1, -1 - (2 * (15 + 6) - 5)], "nothing is drawn again, and only what was missing is embedded"
    own, other = (json.dumps(table(each)).replace(each.name, "") for each in (run, whole))
    assert own == other
    stops[:] = [0, 0]
    evaluate(parsed(run, *words))  # nothing is left to do


def test_missing_and_damaged_pictures_are_drawn_again_alone(
    run: Path, encoders: list[str], stops: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(parsed(run, "--encoders", encoders[0], "--seeds", 1))
    before, first = table(run), run / table(run)["points"][1]["pictures"][0]
    second = run / table(run)["points"][2]["pictures"][1]
    honest = first.read_bytes()
    first.unlink()
    second.write_bytes(second.read_bytes()[:60])
    stops[:] = [2, 0]
    evaluate(parsed(run, "--encoders", encoders[0], "--seeds", 1))
    assert table(run) == before and first.read_bytes() == honest
    said = capsys.readouterr().out
    assert f"{second} is damaged: renamed to {second.name}.damaged; drawing it again" in said and "2 to draw" in said


def test_missing_training_pictures_are_named(run: Path, encoders: list[str], tiny_images: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(tiny_images, mine)
    config = json.loads((run / "config.json").read_text())
    config["data"]["path"] = str(mine)
    (run / "config.json").write_text(json.dumps(config))
    (mine / "002.png").unlink()
    Image.new("RGB", (32, 32)).save(mine / "004.png")
    with pytest.raises(UserError, match=r"2 training pictures missing or changed since the run \(002.png, 004.png\)"):
        evaluate(parsed(run, "--encoders", *encoders))


def test_held_out_pictures_are_no_training_pictures(run: Path, encoders: list[str], unpredicted: None) -> None:
    data = json.loads((run / "data.json").read_text())
    data["held_out"], data["samples"] = data["samples"][:2], data["samples"][2:]
    (run / "data.json").write_text(json.dumps(data))
    evaluate(parsed(run, "--encoders", encoders[0], "--seeds", 1))
    result = table(run)
    assert result["real"] == {"pictures": 4, "of": 4} and result["main"]["prompt_fidelity"] is None
    kid = result["points"][0]["scores"]["kid"]["eye"]
    assert kid["n"] == 2 and kid["low"] is None, "without a prompt there is one picture, and no distance"
    assert "diversity" not in result["points"][0]["scores"], "one picture of a prompt has no diversity"


def test_other_weights_of_the_same_step_are_other_pictures(run: Path, encoders: list[str], tmp_path: Path) -> None:
    def keys(folder: Path) -> list[set[str]]:
        _, plan = planned(folder, "--encoders", *encoders)
        return [{plan.keys[point, shot] for shot in plan.shots} for point in plan.points]

    other = tmp_path / "other"
    shutil.copytree(run, other)
    base, first, last = keys(run)
    assert not (base & first or first & last) and all(len(own) == 8 for own in (base, first, last))
    assert keys(other) == [base, first, last], "a run that is moved keeps its pictures"
    file = next((other / "checkpoints" / "step-000004").glob("pytorch_lora_weights.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    identity.cache_clear()
    *same, changed = keys(other)
    assert same == [base, first] and changed != last


def test_a_run_without_checkpoints_has_its_result(tiny_config: dict, copy_run: TrainOnce) -> None:
    tiny_config["checkpoint"] = {"every": None}
    run = copy_run(tiny_config)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    assert [(point.step, point.strength) for point in evaluated_weights(run, None)] == [(None, None), (4, 1.0)]
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="has no checkpoint and no result. Continue training it"):
        evaluated_weights(run, None)


def test_strength_0_is_the_base_s_twin_and_no_number_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [point.weights.scale for point in evaluated_weights(run, [0.0, 0.5, 0.0])] == [1.0, 0.0, 0.5, 0.0, 0.5]
    points = evaluated_weights(run, [0.5, 1.0])
    assert [point.name(run) for point in points] == ["base", "tiny@2:0.5", "tiny@2:1", "tiny@4:0.5", "tiny@4:1"]
    assert [point.title for point in points[-2:]] == ["step 4 x 0.5", "step 4 x 1"]
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--strengths", "nan"])
    assert "nan is not a number from -1000000 to 1000000, such as 0.8" in capsys.readouterr().err


def test_what_is_missing_or_ambiguous_is_refused(run: Path, encoders: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="@2: all checkpoints of a run are evaluated together. Name the run: .*/tiny$"):
        evaluate(parsed(Path(f"{run}@2"), "--encoders", *encoders))
    with pytest.raises(UserError, match="^[^-].*nowhere does not exist. Name a run, such as runs/demo"):
        evaluate(parsed(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--encoders is missing. Name folders or hub names, such as facebook"):
        evaluate(parsed(run))
    assert [about.title for about in command.encoders_of(True, None)] == ["tiny-dino", "tiny-clip"]  # the demo's own
    shutil.copytree(encoders[0], tmp_path / "eye")
    with pytest.raises(UserError, match="--encoders: two are called eye. Rename one folder"):
        evaluate(parsed(run, "--encoders", encoders[0], tmp_path / "eye"))


def test_a_full_model_has_no_strength(tiny_config: dict, copy_run: TrainOnce) -> None:
    tiny_config |= {"adapter": {"method": "full"}, "checkpoint": {"every": 2}}
    run = copy_run(tiny_config)
    steps = [(point.step, point.strength) for point in evaluated_weights(run, None)]
    assert steps == [(None, None), (2, None), (4, None)]
    with pytest.raises(UserError, match="--strengths: a full model has no strength. Leave them out"):
        evaluated_weights(run, [0.5])


def test_only_a_prediction_draws_nothing(
    run: Path, encoders: list[str], counted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--device", "cpu", "--encoders", *encoders, "--predict"]) == 0
    said = capsys.readouterr().out
    assert all(f"predict {name}: " in said for name in ("text", "draw", "decode", "eye", "reader"))
    assert not (run / "evaluation.json").exists() and Gallery(run).lacking(["x"]) == ["x"]


def test_a_card_that_is_too_small_is_refused_before_anything_is_drawn(
    run: Path, encoders: list[str], counted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, plan = planned(run, "--encoders", *encoders)
    found = estimate_stages(plan, command.encoders_of(False, encoders), 5)
    assert set(found) == {"text", "draw", "decode", "eye", "reader"}
    assert found["draw"].bytes > 4 * 100_000 and found["draw"].seconds > 0
    session.device = torch.device("cuda")
    monkeypatch.setattr(predict_stages, "card_at_hand", lambda device: (Card("tiny", 0.5, (8, 9), found=1.0), 0))
    with pytest.raises(UserError, match=r"text needs .* MiB \(predicted\) and tiny has 512. Use --resident-blocks 0"):
        estimate_stages(plan, command.encoders_of(False, encoders), 5)


def test_predicted_time_is_that_of_every_operation(run: Path, encoders: list[str], counted: None) -> None:
    known = command.encoders_of(False, encoders)

    def found(images: int, *words: object) -> dict[str, float]:
        stages = estimate_stages(planned(run, "--encoders", *encoders, *words)[1], known, images)
        return {name: stage.seconds for name, stage in stages.items()}

    one, ten = found(1, "--steps", "3"), found(10, "--steps", "6")
    assert ten["draw"] == pytest.approx(20 * one["draw"]) and ten["decode"] == pytest.approx(10 * one["decode"])
    assert ten["eye"] == one["eye"] > 40 * 0.01, "40 pictures of at least 10 operations"
    assert one["draw"] > 3 * 0.05 and one["text"] > 0, "3 passes of at least 50 operations"


def test_a_calibrated_cpu_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simpletune.estimate.timing import cpu_speed
    from simpletune.estimate.timing.constants import VERSION, Constants, Grid, constants_file, write_constants
    from simpletune.system.environment import cpu_name

    monkeypatch.setattr(cpu_speed, "current_cpu_speeds", lambda: "measured")
    assert speeds_at_hand(tmp_path, None) == ("measured", "measured on this CPU now")
    threads = torch.get_num_threads()
    constants = Constants(
        version=VERSION, device="a CPU", kind="cpu", capability=None, memory_bytes=None, threads=threads,
        date="2026-11-22", versions="", seconds=1.0, grids={"add.fp32": Grid(axes={"bytes": [4096]}, seconds=[0.5])},
    )  # fmt: skip
    write_constants(constants_file(tmp_path, cpu_name(), threads, "cpu"), constants)
    speeds, source = speeds_at_hand(tmp_path, None)
    assert source == "calibrated on a CPU, 2026-11-22" and speeds.seconds("add", "fp32", (4096,)) == 0.5


@pytest.mark.slow
def test_the_predicted_time_is_near_the_measured(run: Path, encoders: list[str]) -> None:
    """Of processor time, which other programs do not lengthen much."""
    import time

    from simpletune.commands.evaluate.missing_images import generate_missing

    _, plan = planned(run, "--encoders", *encoders)
    gallery = Gallery(run)
    gallery.folder.mkdir(exist_ok=True)
    count = len(plan.points) * len(plan.shots)
    stages = estimate_stages(plan, command.encoders_of(False, encoders), count)
    for _ in range(2):  # the first time imports what is needed
        shutil.rmtree(gallery.folder)
        gallery.folder.mkdir()
        clock = time.process_time()
        assert generate_missing(plan, gallery) == count
        taken = time.process_time() - clock
    # Models as tiny as these take most of their time to launch operators, which the prediction does not count.
    assert 0.1 < (stages["draw"].seconds + stages["decode"].seconds) / taken < 2


def test_the_table_shows_each_encoder_with_its_intervals() -> None:
    value = {"value": 0.5, "low": 0.4, "high": 0.62, "n": 8}
    points = [{"title": "base", "scores": {"subject_fidelity": {"a": value}, "kid": {"b": {**value, "low": None}}}}]
    a, b = ({"title": title, "kind": kind} for title, kind in (("a", "dino"), ("b", "clip")))
    encoders = [a | {"reads_prompts": False}, b | {"reads_prompts": True}]
    shown = command.lines({"encoders": encoders, "points": points, "prompts": {"slice": "mine"}})
    assert shown[0] == "a (dino), mine" and "0.500 ±0.110" in shown[2] and shown[3].split() == ["n", "8"]
    assert shown[4] == "b (clip), mine" and shown[6].split() == ["base", "0.500"]
    assert "KID: another such distance (kernel inception distance)" in shown[-1] and "subject: likeness" in shown[-2]
    assert command.main_encoders(encoders[1:]) == {"subject_fidelity": "b", "prompt_fidelity": "b"}


@pytest.mark.slow
def test_a_run_of_the_demo_gets_nearer_to_its_subject_and_its_class_too(tmp_path: Path, monkeypatch) -> None:
    """The demo as it is: fidelity rises beyond chance, and another figure becomes the subject as well (PRES)."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo_subject"]) == 0
    assert main(["evaluate", "runs/demo-subject"]) == 0
    result = table(Path("runs/demo-subject"))
    base, *_, last = (point["scores"] for point in result["points"])
    assert result["main"] == {"subject_fidelity": "tiny-dino", "prompt_fidelity": "tiny-clip"}
    assert last["subject_fidelity"]["tiny-dino"]["from_base"]["low"] > 0.1
    assert last["cmmd"]["tiny-dino"]["value"] < base["cmmd"]["tiny-dino"]["value"]
    assert last["pres"]["tiny-dino"]["from_base"]["low"] > 0
