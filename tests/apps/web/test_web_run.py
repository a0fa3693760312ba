"""The page of a run: progress, charts, pictures, requests, comparisons, files; hostile names; long runs."""

from __future__ import annotations

import io
import json
import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save
from serving import until
from starlette.testclient import TestClient
from web_pages import open_pages

from simpletune.apps.web import processes, queue, run_page
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run.matrix import matrix_of, small_copy
from simpletune.apps.web.run.progress import EVALUATIONS_SHOWN, evaluation_lines, read_progress
from simpletune.apps.web.run.series import MOST, Follower, Series
from simpletune.apps.web.run_page import PARTS
from simpletune.runs.attempts import Attempt
from simpletune.runs.control import read_requests
from simpletune.runs.report.charts import ChartLine, limits, svg_lines, ticks
from simpletune.stages.png import save_png
from simpletune.stages.sample import ImageRequest
from simpletune.system.card_load import CardMeter
from simpletune.system.locks import exclusive
from simpletune.system.sheets import spread_steps
from simpletune.system.shell import quote_command
from simpletune.system.stage_timer import Stage

HOSTILE = "<img src=x onerror=alert(1)>&\"'"
SETTINGS = {
    "name": "one",
    "adapter": {"method": "lora"},
    "data": {"resolution": 64},
    "train": {"steps": 100},
    "checkpoint": {"every": 10},
    "validation": {"prompts": None, "every": 25, "seed": 3, "steps": 5, "guidance": 4.5},
}


def make_run(folder: Path, steps: int = 12, ended: str | None = "stopped", reason: str = "SIGTERM") -> Path:
    """A run as its files are, without a training."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SETTINGS, "output": {"runs": str(folder.parent)}}))
    rows = [{"step": n, "loss": 1 / n, "lr": 1e-4, "grad_norm": 2.0, "seconds": 2.0} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = {"step": 10, "eval_loss": 0.5, "eval_losses": [0.4, 0.6], "held_out": True}
    (folder / "evaluations.jsonl").write_text(json.dumps(evaluated) + "\n")
    (folder / "eval_before.json").write_text('{"eval_loss": 0.9}')
    stages = {"train": Stage(24.0, 3.0, 3.5, 1.0), "validate": Stage(30.0, 4.0, 4.5, 1.5), "save": Stage(8.0)}
    attempt = Attempt(
        started="2026-11-22T10:00:00Z", device="cpu", from_step=0, last_step=steps, seconds=60, stages=stages,
        ended=ended, reason=reason,
    )  # fmt: skip
    (folder / "attempts.json").write_text(f"[{attempt.model_dump_json()}]")
    snapshot = {"peak_allocated_mib": 3072.0, "by_kind": {"weights": 2048.0, "activations": 1024.0}, "at": "backward"}
    (folder / "predicted.json").write_text(json.dumps({"steps": 120, "memory": {"train": snapshot}}))
    for state in ("base", "step-000010"):
        save_png(Image.new("RGB", (64, 64), "red"), folder / f"samples/{state}/prompt-00.png", ImageRequest(HOSTILE, 3))
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    return folder


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    make_run(tmp_path / "runs" / "one")
    return open_pages(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The verbs that the page would start."""
    found: list[list[str]] = []
    monkeypatch.setattr(processes, "start", lambda roots, words, name, title: found.append([name, *words]))
    return found


def text_of(answer: object) -> str:
    return unescape(re.sub(r"<[^>]+>", "", answer.text))  # type: ignore[attr-defined]


def test_the_page_says_how_far_a_run_is_and_what_mends_it(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    answer = client.get("/run/one")
    assert answer.status_code == 200
    text = text_of(answer)
    assert "stopped step 12 of 120" in text and "by SIGTERM after step 12. It is saved and can continue" in text
    assert quote_command("simpletune", "train", run / "config.json", "--resume", "auto") in text
    table = " ".join(re.sub(r"<[^>]+>", " ", answer.text.partition('id="run-memory"')[2]).split())
    assert "train 24.0 3.0 1.0 3.0 weights 2.0, activations 1.0" in table and "left" not in text
    assert 'id="draw-now"' not in answer.text and 'id="continue"' in answer.text
    assert "Step 10, the last: a loss of 0.5000 on 2 held-out samples" in text
    assert "Its held-out loss is 0.5000: the mean over 2 samples of pictures kept out of training" in text
    assert "The last step's training loss, 0.0833, is lower, but says nothing about this one" in text
    with exclusive(run):
        answer = client.get("/run/one")
        text = text_of(answer)
        # 108 steps of 2 s; 11 saves of 8 s (one checkpoint is there); 5 validations of 30 s / 2 (of base and one step)
        assert "running step 12 of 120, about 6 min 19 s left" in text
        assert "saves after step 20, in 16 s" in text and "evaluates and draws after step 25, in 26 s" in text
        assert 'id="draw-now"' in answer.text and 'id="continue"' not in answer.text
        attempts = json.loads((run / "attempts.json").read_text())
        (run / "attempts.json").write_text(json.dumps([attempts[0] | {"doing": "drawing 2 of 4 pictures"}]))
        assert "step 12 of 120, drawing 2 of 4 pictures, about 6 min" in text_of(client.get("/run/one"))
        predicted = json.loads((run / "predicted.json").read_text())
        (run / "predicted.json").write_text(json.dumps(predicted | {"steps": 12}))  # the last step is done
        assert "step 12 of 12, drawing 2 of 4 pictures\n" in text_of(client.get("/run/one"))
    assert "drawing 2 of 4" not in text_of(client.get("/run/one")), "nothing trains it any more"


def test_how_a_run_ended(tmp_path: Path) -> None:
    for name, ended, reason, said in (
        ("killed", None, "", "was killed, or its machine went down after step 12"),
        ("failed", "failed", "memory: this run needs 9 GiB\n  the cheapest", "failed after step 12:\nmemory: this run"),
        ("finished", "finished", "", ""),
    ):
        progress = read_progress(make_run(tmp_path / name, ended=ended, reason=reason))
        assert said in progress.trouble and bool(progress.command) == bool(said), name


def test_the_two_files_of_an_earlier_version_say_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    expected, file = read_progress(run), run / "predicted.json"
    found = json.loads(file.read_text())
    (run / "planned.json").write_text(json.dumps({"steps": 120, "predicted": found["memory"]}))
    file.write_text('{"steps": 100, "seconds_per_step": 2.0}')  # of a first start that planned fewer
    assert (read_progress(run).steps, read_progress(run).predicted) == (expected.steps, expected.predicted)


def test_damaged_files_are_missing_ones(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    names = ("attempts.json", "predicted.json", "evaluations.jsonl", "eval_before.json", "summary.json", "best.json")
    for name in names:
        (run / name).write_text("[{")
    (run / "samples/base/prompt-00.png").write_bytes(b"no picture")
    (run / "control.json").write_text("{}")
    answer = client.get("/run/one")
    assert answer.status_code == 200 and "step 12 of 100" in text_of(answer)
    assert client.get("/run/one/small/samples/base/prompt-00.png").status_code == 404


def test_charts_show_every_line_and_are_read_aloud(client: TestClient) -> None:
    text = unescape(client.get("/run/one/charts").text)
    assert text.count("<svg") == 4 and text.count("<polyline") == 6
    assert 'aria-label="Loss by step: each step 0.08333 at step 12, smoothed' in text
    assert "held-out pictures 0.5 at step 10" in text
    assert text.count("<circle") == 2


def test_a_chart_lies_within_its_frame() -> None:
    figure = ElementTree.fromstring(svg_lines(HOSTILE, [ChartLine("a<b", [(1, 5.0), (2, 1.0)], "raw", [1.0, 0.0])], 4))
    caption, svg = figure
    assert caption[0].text == HOSTILE and caption[1].text == "a<b"
    assert svg.get("aria-label") == f"{HOSTILE} by step: a<b 1 at step 2"
    (line,) = svg.findall("polyline")
    left, right = (tuple(map(float, each.split(","))) for each in line.get("points", "").split())
    frame = next(float(grid.get("x2", "")) for grid in svg.findall("line[@class='grid-line']"))
    assert left[0] < right[0] < frame and left[1] < right[1]  # steps to the right, larger values higher
    assert line.get("data-values") == "1:5 2:1" and line.get("data-name") == "a<b"  # what chart.js shows
    bar, dot = svg.find("line[@class='raw']"), svg.find("circle")
    assert bar is not None and dot is not None
    low, middle, high = bar.get("y1", ""), dot.get("cy", ""), bar.get("y2", "")
    assert float(high) < float(middle) < float(low)
    assert [text.text for text in svg.findall("text[@text-anchor='middle']")] == ["0", "1", "2", "3", "4"]
    assert svg_lines("t", [ChartLine("a", [], "raw")]) == ""
    assert ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0] or ticks(0.0, 1.0) == pytest.approx([0, 0.5, 1.0])
    assert limits([ChartLine("a", [(n, 1.0) for n in range(999)] + [(999, 1e9)], "raw")])[1] < 2
    assert spread_steps(range(100), 3) == [0, 50, 99] and spread_steps(range(2), 3) == [0, 1]


def test_a_series_keeps_means_extremes_and_few_points() -> None:
    series, many = Series(), 100_000
    for step in range(1, many + 1):
        series.add(step, float(step % 7))
    assert len(series.points) <= MOST and sum(point.count for point in series.points) == many
    assert sum(point.total for point in series.points) == sum(step % 7 for step in range(1, many + 1))
    assert {(point.low, point.high) for point in series.points} == {(0.0, 6.0)}
    assert series.points[-1].step == many and abs(series.points[-1].smooth - 3) < 0.1


def test_a_file_is_read_once_as_it_grows_and_again_when_it_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    follower = Follower(file, ("loss",))
    follower.look()
    assert follower.recent == []
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    follower.look()
    assert follower.rows == 1
    with file.open("a") as opened:
        opened.write('ss": 2.0}\nbroken\n{"step": 3, "loss": "x"}\n{"step": 4, "loss": NaN}\n[1]\n')
    follower.look()
    assert follower.rows == 4 and [point.step for point in follower.series["loss"].points] == [1, 2]
    read = []
    honest = follower._take
    follower._take = lambda text: read.append(text) or honest(text)  # type: ignore[method-assign]
    follower.look()
    assert read == []
    (tmp_path / "new").write_text('{"step": 1, "loss": 9.0}\n' * 9)  # longer than the old one
    os.replace(tmp_path / "new", file)
    follower.look()
    assert follower.rows == 9 and follower.series["loss"].points[0].mean == 9.0


def test_pictures_are_a_matrix_of_prompts_and_steps(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    for step in range(20, 410, 10):
        save_png(Image.new("RGB", (64, 64)), run / f"samples/step-{step:06d}/prompt-00.png", ImageRequest("p", 3))
    matrix = matrix_of(run)
    assert matrix.titles[:2] == ["base", "step 10"] and matrix.titles[-1] == "step 400"
    assert len(matrix.titles) == 25 and matrix.left_out == 16
    text = client.get("/run/one/pictures").text
    assert HOSTILE not in text and "onerror" in unescape(text) and "&lt;img" in text
    small = client.get("/run/one/small/samples/base/prompt-00.png")
    assert small.headers["content-type"] == "image/webp" and small.content[:4] == b"RIFF"
    rows = [re.findall(r'data-title="([^"]+)"', each) for each in text.split('class="timeline"')[1:]]
    assert [len(row) for row in rows] == [23, 2] and rows[1] == ["base", "step 10"] and rows[0][-1] == "step 400"


def test_a_tiny_picture_is_copied_without_blocks(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    with Image.open(io.BytesIO(small_copy(tmp_path / "a.png", 1))) as copy:
        assert (np.asarray(copy.convert("RGB")) == noise).all()


def test_only_files_of_the_run_of_known_kinds_are_sent(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    (run / "report.html").write_text("<script>1</script>")
    (run / "evil.svg").write_text("<svg/>")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "leak.png").symlink_to(tmp_path / "secret.png")
    sent = client.get("/run/one/file/pytorch_lora_weights.safetensors")
    assert sent.content == b"weights" and sent.headers["content-disposition"] == "attachment"
    page = client.get("/run/one/file/report.html")
    assert "sandbox allow-scripts" in page.headers["content-security-policy"]
    assert "connect-src" not in page.headers["content-security-policy"]
    for path in ("evil.svg", "leak.png", "../../secret.png", "%2e%2e/%2e%2e/secret.png", "none.png"):
        assert client.get(f"/run/one/file/{path}").status_code == 404, path
        assert client.get(f"/run/one/small/{path}").status_code == 404, path
    assert client.get("/run/none").status_code == client.get("/run/../now").status_code == 404
    for verb in ("ask", "compare", "choose", "convert", "finish", "continue", "mark", "delete"):  # whatever is sent
        for name, status in (("none", 404), ("one", 415)):
            assert client.post(f"/run/{name}/{verb}", json={}).status_code == status, (name, verb)


def test_buttons_write_the_control_file_and_nothing_else(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    refused = client.post("/run/one/ask", data={"ask": "save"}, headers={"hx-request": "true"})
    assert refused.status_code == 422 and "is not training" in text_of(refused)
    with exclusive(run):
        drawn = {"ask": "draw", "prompt": f" {HOSTILE} ", "seed": "7", "strength": "0.5", "width": "", "guidance": "3"}
        assert client.post("/run/one/ask", data=drawn).status_code == 200
        assert client.post("/run/one/ask", data={"ask": "stop"}).status_code == 200
        for field, value, said in (
            ("seed", "x", "seed: 'x' is not a number"),
            ("seed", "-1", "seed"),
            ("strength", "9", "at most 4"),
            ("width", "100", "multiple of 16"),
            ("prompt", " ", "prompt"),
            ("ask", "explode", "Use draw, save or stop"),
        ):
            wrong = client.post("/run/one/ask", data={**drawn, field: value})
            assert wrong.status_code == 422 and said in text_of(wrong), (field, text_of(wrong))
    draw, stop = read_requests(run)
    assert draw.prompt == HOSTILE and draw.seed == 7 and draw.strength == 0.5 and draw.width is None  # type: ignore[union-attr]
    assert stop.ask == "stop"
    assert {file for file in run.rglob("*") if file not in before} == {run / "control.json", run / ".control.lock"}
    assert all(file.stat().st_mtime_ns == at for file, at in before.items() if file.is_file())
    shown = client.get("/run/one/requests")
    assert HOSTILE not in shown.text and "waiting: draw" in text_of(shown)


def test_answers_and_pictures_on_request_are_shown(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    rows = [
        {"id": "a", "ask": "draw", "state": "refused", "step": 3, "why": f"too large {HOSTILE}"},
        {"id": "b", "ask": "draw", "state": "done", "step": 4, "file": "drawn/step-000004-b.png"},
        {"id": "c", "ask": "save", "state": "done", "step": 5, "file": "checkpoints/step-000005"},
    ]
    (run / "control_answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = "drawn/step-000004-b.png"
    save_png(Image.new("RGB", (64, 64)), run / name, ImageRequest("a fox", 7))
    drawn = {"step": 4, "file": name, "id": "b", "prompt": "a fox", "seed": 7, "strength": 0.5}
    gone = {**drawn, "file": "../../secret.png"}
    (run / "drawn" / "drawn.jsonl").write_text(f"{json.dumps(drawn)}\n{json.dumps(gone)}\n")
    answer = client.get("/run/one/requests")
    text = text_of(answer)
    assert "step 3: draw refused. too large" in text and "step 5: save done: checkpoints/step-000005" in text
    assert "step 4, seed 7, strength 0.5" in text and answer.text.count("<img") == 1 and "secret" not in answer.text


def test_a_comparison_is_drawn_by_a_command_and_shown_with_a_slider(
    client: TestClient, tmp_path: Path, started: list[list[str]]
) -> None:
    run = tmp_path / "runs" / "one"
    asked = {"prompt": "--help", "step": "10", "seed": "4", "strengths": "1, 0.5 1"}
    assert client.post("/run/one/compare", data=asked).status_code == 200
    source = f"{run}@10"
    words = ["compare", f"{source}:0.5", f"{source}:1", "--run", source, "--prompt=--help", "--seed=4", "--predict"]
    assert started == [["compare-one", *words]]
    for field, value in (("strengths", "a"), ("strengths", "9"), ("strengths", "0"), ("prompt", "a\0b"), ("step", "x")):
        assert client.post("/run/one/compare", data={**asked, field: value}).status_code == 422, field
    assert len(started) == 1
    place = run / "compare" / "0001"
    models = [{"title": title, "weights": weights} for title, weights in (("base", "base"), (HOSTILE, "LoRA a x 1"))]
    for folder in ("base", "LoRA-a-x-1"):
        save_png(Image.new("RGB", (16, 16)), place / folder / "000.png", ImageRequest("p", 4))
    (place / "compare.json").write_text(json.dumps({"models": models, "pictures": [{"prompt": "p", "seed": 4}]}))
    (run / "compare" / "0002").mkdir()  # still being drawn
    text = client.get("/run/one/comparisons").text
    assert text.count("<img") == 2 and text.count("hidden") == 1 and 'max="1"' in text and HOSTILE not in text


def test_what_the_buttons_start(client: TestClient, tmp_path: Path, started: list[list[str]]) -> None:
    run = tmp_path / "runs" / "one"
    client.post("/run/one/choose", data={"step": "10"})
    client.post("/run/one/choose", data={"step": "auto"})
    client.post("/run/one/report")
    client.post("/run/one/finish", data={"step": "10"})
    assert started == [
        ["choose-one", "evaluate", str(run), "--choose", "10"],
        ["choose-one", "evaluate", str(run), "--choose", "auto"],
        ["report-one", "report", str(run)],
        ["finish-one", "control", f"{run}@10", "--finish"],
    ]


SAVED = "checkpoints/step-000010/pytorch_lora_weights.safetensors"


def lora(layout: str) -> bytes:
    """A LoRA file's bytes in diffusers' or kohya's layout."""
    name, ends = {
        "diffusers": ("transformer.transformer_blocks.0.attn.to_q", (".lora_A.weight", ".lora_B.weight")),
        "kohya": ("lora_unet_joint_blocks_0_x_block_attn_proj", (".lora_down.weight", ".lora_up.weight")),
    }[layout]
    return save({name + ends[0]: np.ones((2, 4), np.float32), name + ends[1]: np.ones((4, 2), np.float32)})


def test_one_button_gives_the_best_step_for_comfyui_converted_once(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = tmp_path / "runs" / "one", []
    (run / SAVED).write_bytes(lora("diffusers"))

    def start(roots: Roots, words: list[str], name: str, title: str) -> None:
        begun.append(words)
        Path(words[words.index("--out") + 1]).write_bytes(b"converted")

    monkeypatch.setattr(processes, "start", start)
    page = client.get("/run/one").text
    assert "Download for ComfyUI<small>step 10, the last</small>" in page
    form = page.partition('action="/run/one/convert"')[2]
    assert 'name="step" value="10"' in form and 'name="format" value="comfyui"' in form
    part = client.post("/run/one/convert", data={"step": "10", "format": "comfyui"}, headers={"hx-request": "true"})
    address = unescape(re.findall(r'href="([^"]+)" download', part.text)[0])
    assert "one.safetensors" in part.text and "models/loras" in part.text
    sent = client.get(address)
    assert sent.content == b"converted" and 'filename="one.safetensors"' in sent.headers["content-disposition"]
    assert client.post("/run/one/convert", data={"step": "10"}).headers["location"] == address  # without scripts
    assert len(begun) == 1 and begun[0][:5] == ["lora", "export", f"{run}@10", "--format", "kohya"]
    assert Path(begun[0][6]).is_relative_to(tmp_path / "runs" / ".web" / "downloads" / "run-one")
    (run / SAVED).write_bytes(lora("diffusers") + b"")  # trained again
    os.utime(run / SAVED, ns=(1, 1))
    assert client.get(address).status_code == 404
    client.post("/run/one/convert", data={"step": "10"})
    assert len(begun) == 2 and len(list((tmp_path / "runs/.web/downloads/run-one").iterdir())) == 1
    written = client.get("/run/one/download?step=10&format=as-written")
    assert written.content == lora("diffusers") and "one-step-10-as-written" in written.headers["content-disposition"]
    assert len(begun) == 2
    for wrong in ({"format": "../x"}, {"step": "x"}, {"step": "11"}, {"step": ""}):
        assert client.post("/run/one/convert", data={"step": "10", **wrong}).status_code == 422, wrong


def test_the_result_is_offered_only_if_it_is_of_the_best_step(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    for file in (SAVED, "pytorch_lora_weights.safetensors"):
        (run / file).write_bytes(lora("diffusers"))
    for steps, step in ((12, "10"), (10, "")):
        (run / "summary.json").write_text(json.dumps({"steps": steps, "output": "x"}))
        form = client.get("/run/one/result").text.partition('action="/run/one/convert"')[2]
        assert form.index(f'name="step" value="{step}"') < form.index("step 10, the last"), steps


def test_a_file_that_comfyui_loads_is_not_converted(
    client: TestClient, tmp_path: Path, started: list[list[str]]
) -> None:
    run = tmp_path / "runs" / "one"
    (run / SAVED).write_bytes(lora("kohya"))
    assert client.post("/run/one/convert", data={"step": "10"}).status_code == 303
    assert client.get("/run/one/download?step=10&format=comfyui").content == lora("kohya")
    assert started == []
    options = client.get("/run/one/result").text.partition('id="file-format"')[2].partition("</select>")[0]
    assert (
        "as the run wrote it (kohya)" in options and 'value="kohya"' not in options and 'value="diffusers"' in options
    )


def test_a_conversion_that_fails_says_why_on_the_page(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "one" / SAVED).write_bytes(lora("diffusers"))
    honest = processes.start
    (tmp_path / "fails.py").write_text("raise SystemExit('error: the disk is full')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "start", lambda roots, words, name, title: honest(roots, [], name, "fails", title))
    answer = client.post("/run/one/convert", data={"step": "10"}, headers={"hx-request": "true"})
    assert answer.status_code == 200 and "The file could not be converted: the disk is full" in text_of(answer)


def test_a_full_fine_tuning_says_where_its_folder_is(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "config.json").write_text(json.dumps({**SETTINGS, "adapter": {"method": "full"}}))
    (run / "summary.json").write_text(json.dumps({"steps": 12, "output": "runs/one/transformer"}))
    text = text_of(client.get("/run/one/result"))
    assert "The result is the folder runs/one/transformer" in text and "Download for" not in text
    assert f"simpletune lora merge --base {run} --out one.safetensors" in text


def test_the_card_s_figures_are_shown_while_a_run_trains_on_one(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "one"
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA L4, 7168, 23040, 97, 68.31, [N/A], 61'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(run_page, "METER", CardMeter())
    with exclusive(run):
        assert client.get("/run/one/card").text.strip() == ""  # it trains on the CPU
        attempts = (run / "attempts.json").read_text()
        (run / "attempts.json").write_text(attempts.replace('"cpu"', '"NVIDIA L4"'))
        text = re.sub(r"\s+", " ", text_of(client.get("/run/one/card")))
        assert text.strip() == "Card's memory now7.0 of 22.5 GiBPower68 WTemperature61 °CLoad97 %"
        smi.unlink()
        assert client.get("/run/one/card").text.strip() == ""
    assert client.get("/run/one/card").text.strip() == ""


def test_a_comparison_is_shown_while_it_runs_and_can_be_stopped(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = processes.start
    (tmp_path / "waits.py").write_text("import time\nprint('compare: 1 of 9', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(roots: Roots, words: list[str], log_name: str, title: str) -> int:
        return honest(roots, [], log_name, "waits", title)

    monkeypatch.setattr(processes, "start", start)
    asked = {"prompt": "a dog", "step": "10"}
    assert "Started: Comparison." in client.post("/run/one/compare", data=asked).text
    until(lambda: "compare: 1 of 9" in client.get("/run/one/jobs").text)
    page = client.get("/run/one")  # as after a reload
    assert re.search(r"running Comparison, \d+ s", text_of(page)) and 'value="compare"' in page.text
    twice = client.post("/run/one/compare", data=asked)
    assert twice.status_code == 200 and "Comparison is still running, since" in text_of(twice)
    assert 'value="compare"' in twice.text and "compare-one" not in text_of(twice)
    assert client.post("/run/one/stop", data={"kind": "train"}).status_code == 422
    assert client.post("/run/one/stop", data={"kind": "compare"}).status_code == 200
    until(lambda: "Comparison: stopped" in text_of(client.get("/run/one/jobs")))
    assert 'value="compare"' not in client.get("/run/one/jobs").text
    assert processes.exit_code(client.app.app.state.roots, "compare-one") == -15  # type: ignore[attr-defined]


def test_going_on_puts_the_run_into_the_queue_with_more_steps(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "one"
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    settings = json.loads((run / "config.json").read_text())
    changed = {"name": "other", "train": {"steps": None, "epochs": 3}, "output": {"runs": "runs", "cache": "c"}}
    (run / "config.json").write_text(json.dumps(settings | changed))
    assert client.post("/run/one/continue", data={"steps": "150"}).status_code == 200
    (entry,) = queue.read_queue(client.app.app.state.roots)  # type: ignore[attr-defined]
    assert (entry.name, entry.resume, entry.state) == ("one", True, "waiting")
    config = json.loads(Path(entry.config).read_text())
    output = {"runs": str(tmp_path / "runs"), "cache": "c"}
    assert config == settings | {"name": "one", "train": {"steps": 150, "epochs": None}, "output": output}
    assert not Path(entry.config).is_relative_to(run)
    with exclusive(run):
        assert client.post("/run/one/continue", data={"steps": "150"}).status_code == 422


def test_a_hostile_run_stays_text(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    run = make_run(tmp_path / "runs" / name, ended="failed", reason=f"</pre>{HOSTILE}")
    (run / "summary.json").write_text(json.dumps({"steps": 12, "output": HOSTILE}))
    client = open_pages(tmp_path)
    for part in ("", *(f"/{each}" for each in PARTS)):
        answer = client.get(f"/run/{quote(name)}{part}")
        assert answer.status_code == 200 and "<img src=x" not in answer.text, part
    page = client.get(f"/run/{quote(name)}").text
    assert " style=" not in page and " onclick" not in page
    assert page.count("<script") == page.count('<script src="/static/')


def test_a_label_for_every_field_and_a_text_for_every_picture(client: TestClient, tmp_path: Path) -> None:
    with exclusive(tmp_path / "runs" / "one"):
        texts = [client.get("/run/one").text]
    texts.append(client.get("/run/one").text)
    for text in texts:
        ids = re.findall(r' id="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        fields = re.findall(r"<(?:input|select|textarea)(?![^>]*hidden)[^>]* id=\"([^\"]+)\"", text)
        assert fields and set(fields) == set(re.findall(r'<label for="([^"]+)"', text))
        assert all(re.search(r' alt="[^"]+', image) for image in re.findall(r"<img[^>]*>", text))
        for words in re.findall(r'aria-labelledby="([^"]+)"', text):
            assert words in ids


def test_a_change_of_the_parts_is_told(client: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    number = client.get("/changes").json()["number"]
    (run / "control.json").write_text('{"requests": []}')
    (run / "samples" / "step-000020").mkdir()
    (run / "compare").mkdir()
    with exclusive(run):
        client.app.app.state.watch._looked = float("-inf")  # type: ignore[attr-defined]
        topics = client.get(f"/changes?since={number}").json()["topics"]
    parts = [f"{part}:one" for part in ("after", "comparisons", "held", "pictures", "requests", "run")]
    assert topics == [*parts, "runs"]


def test_a_run_of_many_steps_has_a_short_page_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, honest = [], Follower._take
    monkeypatch.setattr(Follower, "_take", lambda self, text: read.append(text) or honest(self, text))
    run = make_run(tmp_path / "runs" / "one", steps=20_000, ended=None)
    client = open_pages(tmp_path)
    assert len(client.get("/run/one/now").text) < 150_000
    assert sum(map(len, read)) > 1_000_000
    read.clear()
    line = '{"step": 20001, "loss": 0.5}\n'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line)
    assert "step 20,001" in text_of(client.get("/run/one/now"))
    assert b"".join(read).strip() == line.strip().encode(), "nothing is read again"


def test_a_chart_of_many_evaluations_shows_some_of_them_and_the_lowest(tmp_path: Path) -> None:
    rows = [{"step": step, "eval_loss": 0.5 if step == 141 else 1.0, "eval_losses": [1.0]} for step in range(1, 901)]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = evaluation_lines(tmp_path)
    steps = [step for step, _ in line.dots]
    assert len(steps) == len(line.errors) == EVALUATIONS_SHOWN + 1
    assert (steps[0], steps[-1]) == (1, 900) and (141, 0.5) in line.dots
