"""The two studies of quality and the two sets of ``choice``: their rows, what is made of them, and their pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import (
    choice,
    judged,
    quality,
    student_study,
    study,
    vertex_quality,
)
from benchmarks.judged import Studio
from simpletune.config.load import read_json
from simpletune.data.demo import demo_scenes
from simpletune.system.options import Json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def test_the_checker_reads_the_subject_itself() -> None:
    asked = judged.subject_prompts(12)
    assert all(judged.SUBJECT in prompt.text for prompt in asked) and len({prompt.text for prompt in asked}) == 12
    true = [demo_scenes.render_subject(p.scene.background, p.scene.size, p.scene.position) for p in asked]
    assert judged.read_shares(true, asked) == (1.0, 1.0)
    others = quality.unrelated(12)
    assert judged.read_shares([demo_scenes.render(p.scene) for p in others], others)[0] == 0.0
    elsewhere = [*true[1:], true[0]]
    likeness, placed = judged.read_shares(elsewhere, asked)
    assert likeness == 1.0 and placed < 0.8


@pytest.mark.parametrize("name", ["demo", "demo_full", "demo_embeddings", "demo_sdxl"])
def test_the_demos_prompts_are_chosen_by_number_from_the_fixed_set(name: str) -> None:
    """Validation: numbers 2 and 3 with the trigger and 4 without; drift: the first flat and painted ones."""
    validation = read_json(Path(name))["validation"]
    named = quality.prompts_of(4, quality.STYLE, demo_scenes.STYLE_TRIGGER)
    others = quality.unrelated(100)
    assert validation["prompts"] == [named[1].text, named[2].text, others[3].text]
    assert validation["unrelated_prompts"] == [others[0].text, others[50].text]


def test_no_set_repeats_a_run_or_a_seed_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first, second, third = ([quality.Quality(Path("x"), 1, []).config(options) for options in each.rows.values()]
                            for each in choice.SETS.values())  # fmt: skip
    seeds = [{config.train.seed for config in each} for each in (first, second, third)]
    assert [len(second), len(third)] == [8, 7] == list(map(len, seeds[1:])) and len({*seeds[1], *seeds[2]}) == 15
    assert not seeds[0] & (seeds[1] | seeds[2])
    style = {(method, "demo:pictures") for method in ("loha", "oft", "partial")}
    assert style <= {(config.adapter.method, config.data.place) for config in second}
    assert not style & {(config.adapter.method, config.data.place) for config in first}
    plans = [{(config.adapter.model_dump_json(), config.data.place, config.optimizer.lr) for config in each}
             for each in (first + second, third)]  # fmt: skip
    assert len(plans[1]) == 7 and not plans[0] & plans[1]
    assert all(config.train.steps and config.train.steps % choice.PARTS == 0 for config in first + second + third)


def test_a_set_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = json.loads((RESULTS / "choice_second.json").read_text())["rows"]
    names = ["style: OFT, 250 steps", "subject: full, 200 steps"]
    measured = iter([rows[name] for name in names])
    taken: list[list[str]] = []
    monkeypatch.setattr(choice, "measure", lambda quality, options, count: taken.append(options) or next(measured))
    page = choice.run(tmp_path, 3, 5, "OFT; subject: full", [], "second")
    assert page == tmp_path / "choice_second.md" and taken == [choice.SECOND[name] for name in names]
    told, kept = page.read_text(), (RESULTS / "choice_second.md").read_text()
    shown = [line for line in told.splitlines() if line.startswith(tuple(f"| {name} |" for name in names))]
    assert len(shown) == 2 and set(shown) <= set(kept.splitlines())
    assert "1 of 5 held out" in told and not (tmp_path / "choice.json").exists()


def test_every_row_of_the_vertex_study_is_as_the_report_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pictures in every row, the report's batches, and a rate by its rule."""
    monkeypatch.chdir(ROOT)
    batches, rules = vertex_quality.BATCHES, vertex_quality.RULES
    assert batches["same rate"] == tuple(vertex_quality.COSTS["LoRA", "A100-40GB"])
    assert all(vertex_quality.IMAGES % batch == 0 for each in batches.values() for batch in each)
    assert [rule(32) for rule in rules.values()] == pytest.approx([0.001, 0.001 * 8**0.5, 0.008])
    for method, options in vertex_quality.METHODS.items():
        config = Studio(vertex_quality.CONFIG, []).config([*vertex_quality.ALL, *options, "train.steps=600"], "x")
        assert config.adapter.trains_base == (method == "full") and config.schedule.name == "constant"
        assert config.precision.weights == "fp32" and config.data.place == "demo:subject"


def committed(name: str) -> Json:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def test_means_are_over_the_seeds_and_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"subject": 0.5, "prompt": 0.7, "likeness": 0.25, "placed": 0.9, "others": 1.0,
              "subject_half": 0.1, "prompt_half": 0.02}  # fmt: skip
    runs = {
        "full, seed 0": {"points": {"0": scores, "100": {**scores, "subject": 0.6}, "200": scores}},
        "full, seed 1": {"points": {"0": scores, "100": {**scores, "subject": 0.8}}},
        "LoRA r8, seed 0": {"points": {"0": scores, "100": {**scores, "subject": 0.55}}},
    }
    paths = vertex_quality.measured_paths(runs)
    assert list(paths["full"]) == [0, 100] and paths["full"][100]["subject"] == pytest.approx(0.7)
    assert paths["full"][100]["subject_range"] == pytest.approx(0.2) and paths["LoRA r8"][100]["of"] == 1
    rows = committed("student_study")
    monkeypatch.setattr(judged, "image", lambda spec: json.dumps(spec).encode())  # make pages draws it
    judged.chart(tmp_path / "chart.png", student_study.panels(student_study.averaged(rows)))
    panels = json.loads((tmp_path / "chart.png").read_text())["hconcat"]
    runs = [[point["run"] for point in panel["data"]["values"]] for panel in panels]
    assert runs == [list(study.RUNS)] * 2


@pytest.mark.slow
def test_a_cost_is_the_steps_seconds_at_the_reports_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    row = vertex_quality.cost_row("LoRA", "V100-16GB", 8)
    assert row["steps"] == 100 and row["published"] == 0.13
    assert row["cost"] == pytest.approx(100 * row["step"] / 3600 * 2.852, rel=0.01) and 0.05 < row["step"] < 5


def test_the_student_study_has_the_settings_of_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    studio = Studio(student_study.DEMO, [])
    for name, options in study.RUNS.items():
        settings = [*options, *study.BOTH, *study.TINY, *study.TINY_RATE.get(name, ())]
        own = studio.config(settings, "x")
        known = study.config_of(name, None, [])[2]
        for part in ("adapter", "precision", "optimizer", "train", "schedule", "memory", "data"):
            assert getattr(own, part) == getattr(known, part), part
    names = student_study.Study(Path("x"), 2, []).rows()
    assert len(names) == 4 * len(student_study.SEEDS) + 4 and list(names)[-1] == "L4: LoRA r1, int8"


def test_strips_become_one_sheet_and_scores_figures(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (192, 64), colour).save(tmp_path / f"{name}.png")
    strips = [("first", tmp_path / "a.png"), ("gone", tmp_path / "c.png"), ("second", tmp_path / "b.png")]
    judged.sheet_of(strips, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        found = {colour: count for count, colour in sheet.getcolors(2**20)}
    assert found[(255, 0, 0)] == found[(0, 0, 255)] >= 3 * 128 * 128
    judged.sheet_of([("gone", tmp_path / "c.png")], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert judged.lacking(["a", "b", "c"], {"b": 1}) == ["", "Not measured yet: a; c."]
    assert judged.lacking(["b"], {"b": 1}) == []
    dino, clip = {"value": 0.4, "low": 0.3, "high": 0.5}, {"value": 0.7, "low": 0.68, "high": 0.72}
    scores = {"subject_fidelity": {"tiny-dino": dino, "tiny-clip": clip}, "prompt_fidelity": {"tiny-clip": clip}}
    found = {"subject": 0.4, "subject_half": 0.1, "prompt": 0.7, "prompt_half": 0.02}
    assert judged.fidelities_of({"scores": scores}) == pytest.approx(found)


def test_the_page_shows_the_committed_figures() -> None:
    """Every row of the study's tables on the page is, without some columns, a row of the results."""
    page = (ROOT / "docs/explanation/measurements.md").read_text()
    section = page.partition("## Full fine-tuning against LoRA")[2].partition("\n## ")[0]
    results = [set(cells) for cells in cells_of((RESULTS / "student_study.md").read_text())]
    shown = [set(cells) for cells in cells_of(section) if cells[0].startswith(("full", "LoRA"))]
    assert len(shown) == 8 and [cells for cells in shown if not any(cells <= row for row in results)] == []


def cells_of(text: str) -> list[list[str]]:
    """The rows of a page's tables."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
