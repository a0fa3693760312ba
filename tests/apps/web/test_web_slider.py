"""New run without pictures: a slider's prompts in the form, its configuration and command, its run's page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from test_web_start import HX, Form, change
from tiny_runs import run_with
from web_pages import open_pages

from simpletune.apps.web import live, queue
from simpletune.apps.web.form import presets
from simpletune.apps.web.run.matrix import strip_of
from simpletune.config.load import validate
from simpletune.system.gpus import find_card

TARGET, POSITIVE, NEGATIVE = (f"concept.directions.0.{name}" for name in ("target", "positive", "negative"))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[live.EstimateRequest]:
    wishes: list[live.EstimateRequest] = []
    monkeypatch.setattr(live.Estimator, "want", lambda self, form, wish: wishes.append(wish))
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    monkeypatch.setattr(presets, "card_here", lambda: None)
    return wishes


def test_prompts_make_a_run(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    client = open_pages(tmp_path)
    assert 'href="/start?base=slider"' in client.get("/start").text
    page = client.get("/start?base=slider").text
    assert "data.path" not in page and "What the pictures show" not in page
    values = Form(page).values
    assert (values[TARGET], values[POSITIVE]) == ("a person", "a person, smiling")
    words = {TARGET: "a medium disc", POSITIVE: "a large disc", NEGATIVE: "a small disc", "name": "size"}
    answer, values = change(client, values | words, **{"train.steps": "20"})
    assert "disabled" not in re.search(r'<button class="main big"[^>]*>', answer)[0]
    saved = json.loads(client.post("/start/config.json", data=values).text)
    config = validate(saved, "saved")
    assert config.data is None and config.concept is not None and config.is_demo
    assert config.concept.directions[0].ends == ("a large disc", "a small disc")
    assert quiet and quiet[-1].data["data"] is None  # it is predicted
    command = re.search(r"simpletune init --slider [^\n<]*", answer.replace("&#39;", "'").replace("&amp;", "&"))
    assert command is not None and shlex.split(command[0])[3:6] == ["a medium disc", "a large disc", "a small disc"]
    begun = client.post("/start/run", data=values, follow_redirects=False)
    assert begun.status_code == 303 and begun.headers["location"].startswith("/queued/")


def test_a_problem_stands_at_its_prompt(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    client = open_pages(tmp_path)
    values = Form(client.get("/start?base=slider").text).values
    answer, _ = change(client, values | {NEGATIVE: "a person, smiling"})
    note = re.search(r'id="n-concept-directions-0-negative".*?</div>', answer, re.DOTALL)
    assert note is not None and "equals positive" in note[0]
    answer, _ = change(client, values | {POSITIVE: "", NEGATIVE: ""})
    assert "so there is no direction" in answer


def test_several_directions_are_fields(tmp_path: Path, quiet: list[live.EstimateRequest]) -> None:
    client = open_pages(tmp_path)
    page = client.get("/start?base=slider").text
    answer, values = change(client, Form(page).values, **{"concept.directions": "2"})
    assert 'id="prompts" hx-swap-oob' in answer and answer.count('id="i-concept-directions-1-positive"') == 1
    assert "What changes (2)" in answer and "so there is no direction" in answer
    second = {"concept.directions.1.target": "a disc", "concept.directions.1.positive": "a red disc"}
    answer, values = change(client, values, **second, **{"concept.directions.1.preserved": "a heart"})
    assert 'id="prompts"' not in answer  # what is being typed in stays
    assert "so there is no direction" not in answer
    reloaded = client.get(answer_address(client, values)).text
    assert Form(reloaded).values["concept.directions.1.positive"] == "a red disc"
    saved = json.loads(client.post("/start/config.json", data=values).text)
    config = validate(saved, "saved")
    assert config.concept is not None
    first, other = config.concept.directions
    assert first.target == "a person" and (other.ends, other.preserved) == (("a red disc", ""), ["a heart"])
    assert "&#39;concept.directions=[{" in answer  # the command has them
    answer, values = change(client, values, **{"concept.directions": "1"})
    saved = json.loads(client.post("/start/config.json", data=values).text)
    assert len(saved["concept"]["directions"]) == 1 and "concept.directions.1.target" not in answer


def answer_address(client: TestClient, values: dict[str, str]) -> str:
    """The address that keeps what was entered."""
    return client.post("/start/change", data=values, headers=HX).headers["hx-replace-url"]


def test_every_direction_of_a_configuration_has_its_prompts_in_view(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    page = open_pages(tmp_path).get("/start?base=shipped:demo_slider").text
    above, _, sections = page.partition('id="everything"')
    for number in range(8):
        for name in ("target", "positive", "negative"):
            field = f'name="concept.directions.{number}.{name}"'
            assert field in above and field not in sections
    assert Form(page).values["concept.directions"] == "8"
    assert 'name="concept.directions.7.guidance"' in sections


def test_another_card_and_model_keep_the_prompts(
    tmp_path: Path, quiet: list[live.EstimateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "has_token", lambda: True)
    client = open_pages(tmp_path)
    values = Form(client.get("/start?base=slider").text).values | {TARGET: "a cat", POSITIVE: "a fat cat", NEGATIVE: ""}
    _, values = change(client, values, card=find_card("L4").name)
    _, values = change(client, values, pick="stabilityai/stable-diffusion-xl-base-1.0")
    values.pop("pick", None)
    saved = json.loads(client.post("/start/config.json", data=values).text)
    assert saved["model"]["family"] == "sdxl" and saved["precision"]["weights"] == "bf16"
    assert saved["concept"]["directions"] == [{"target": "a cat", "positive": "a fat cat"}]


def test_a_change_between_pictures_and_prompts_is_another_page(
    tmp_path: Path, quiet: list[live.EstimateRequest]
) -> None:
    client = open_pages(tmp_path)
    for address, base, there in (
        ("/start", "shipped:sdxl_slider", TARGET),
        ("/start?base=slider", "preset", "data.path"),
    ):
        values = Form(client.get(address).text).values | {"base": base}
        answer = client.post("/start/change", data=values, headers=HX)
        assert there in Form(client.get(answer.headers["hx-redirect"]).text).values


def test_the_runs_page_has_a_slider_over_strengths(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    direction = {"target": "a circle", "positive": "a large circle", "negative": "a small circle"}
    data = tiny_config | {"concept": {"directions": [direction], "resolutions": [32], "drawing_steps": 3}}
    del data["data"]
    validation = {"prompts": ["a circle", "a heart"], "every": 1, "steps": 2, "loss_samples": 0}
    run = run_with(data, validation=validation, train={"steps": 2}, checkpoint={"every": None})
    rows = strip_of(run)
    assert [row["prompt"] for row in rows] == ["a circle", "a heart"]
    assert [frame["title"] for frame in rows[0]["frames"]] == ["-2", "-1", "0", "1", "2"]
    assert rows[0]["frames"][3]["file"] == "samples/step-000002/prompt-00.png"
    client = open_pages(run.parents[1])
    page = client.get(f"/run/{run.name}").text
    assert page.count("Strength <output") == 2
    shown = client.get(f"/run/{run.name}/small/{rows[1]['frames'][0]['file']}")
    assert shown.status_code == 200
