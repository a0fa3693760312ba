"""The two studies of quality and the two sets of ``choice``: their rows, what is made of them, and their pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import choice, judged, prior, quality, student_study, study, vertex_quality
from benchmarks.judged import Studio
from simpletune.data.demo import pictures
from simpletune.system.options import Json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def point(**changes: float) -> Json:
    """Scores of one checkpoint."""
    scores = {"subject": 0.5, "prompt": 0.7, "likeness": 0.25, "placed": 0.9, "others": 1.0}
    return {**scores, "subject_half": 0.1, "prompt_half": 0.02, **changes}


def test_the_checker_reads_the_subject_itself() -> None:
    asked = prior.prompts_of(12, prior.SUBJECT)
    true = [pictures.draw_subject(p.scene.background, p.scene.size, p.scene.position) for p in asked]
    assert prior.read_shares(true, asked) == (1.0, 1.0)
    others = quality.unrelated(12)
    assert prior.read_shares([pictures.draw(p.scene) for p in others], others)[0] == 0.0
    elsewhere = [*true[1:], true[0]]
    likeness, placed = prior.read_shares(elsewhere, asked)
    assert likeness == 1.0 and placed < 0.8


def test_the_second_set_shares_nothing_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configs = {name: [quality.Quality(Path("x"), 1, []).config(options) for options in wanted.rows.values()]
               for name, wanted in choice.SETS.items()}  # fmt: skip
    assert [len(rows) for rows in configs.values()] == [8, 8]
    seeds = {name: {config.train.seed for config in rows} for name, rows in configs.items()}
    assert len(seeds["second"]) == 8 and not seeds["first"] & seeds["second"]
    trained = {name: {(config.adapter.method, config.data.place) for config in rows} for name, rows in configs.items()}
    style = {(method, "demo:pictures") for method in ("loha", "oft", "partial")}
    assert style <= trained["second"] and not style & trained["first"]
    assert sum(config.data.place == "demo:subject" for config in configs["second"]) == 4
    steps = [config.train.steps for rows in configs.values() for config in rows]
    assert all(number is not None and number % choice.PARTS == 0 for number in steps)


def test_a_set_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    row = {"last": 0.5, "chosen": 0.6, "step": 40, "by": "fidelity", "difference": 0.1, "held_out": 0.4,
           "held_out_step": 80, "training": 0.5, "training_step": 200, "best": 0.6, "scores": {}}  # fmt: skip
    taken: list[list[str]] = []
    monkeypatch.setattr(choice, "measure", lambda quality, options, count: taken.append(options) or row)
    page = choice.run(tmp_path, 3, 5, "OFT; subject: full", [], "second")
    assert page == tmp_path / "choice_second.md" and taken == [
        choice.SECOND["style: OFT, 250 steps"], choice.SECOND["subject: full, 200 steps"]
    ]  # fmt: skip
    told = page.read_text()
    assert "Not worse than the last one in 2 of 2; by held-out loss in 0, by training loss in 2." in told
    assert "1 of 5 held out" in told and not (tmp_path / "choice.json").exists()


def test_every_row_of_the_vertex_study_is_as_the_report_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pictures in every row, the report's batches and dollars, and a rate by its rule."""
    monkeypatch.chdir(ROOT)
    assert vertex_quality.BATCHES["same rate"] == tuple(vertex_quality.COSTS["LoRA", "A100-40GB"])
    rates = {}
    for rule, batches in vertex_quality.BATCHES.items():
        for batch in batches:
            assert vertex_quality.PICTURES % batch == 0
            rates[rule, batch] = vertex_quality.RULES[rule](batch)
    assert rates["same rate", 32] == 0.001 and rates["rate by batch", 32] == pytest.approx(0.008)
    assert rates["rate by root of batch", 1] == pytest.approx(0.0005)
    assert {rule(vertex_quality.BATCH) for rule in vertex_quality.RULES.values()} == {0.001}
    studio = Studio(vertex_quality.CONFIG, [])
    for method, options in vertex_quality.METHODS.items():
        config = studio.config([*vertex_quality.ALL, *options, "train.steps=600"], "x")
        assert config.adapter.trains_base == (method == "full") and config.schedule.name == "constant"
        assert config.precision.weights == "fp32" and config.data.place == "demo:subject"


def test_the_vertex_page_has_means_over_seeds_and_published_costs() -> None:
    runs = {
        "full, seed 0": {"points": {"0": point(), "100": point(subject=0.6), "200": point()}},
        "full, seed 1": {"points": {"0": point(), "100": point(subject=0.8)}},
        "LoRA r8, seed 0": {"points": {"0": point(), "100": point(subject=0.55)}},
    }
    paths = vertex_quality.measured_paths(runs)
    assert list(paths["full"]) == [0, 100] and paths["full"][100]["subject"] == pytest.approx(0.7)
    assert paths["full"][100]["subject_range"] == pytest.approx(0.2) and paths["LoRA r8"][100]["of"] == 1
    batch = {"batch": 4, "rule": "same rate", "steps": 200, "rate": 0.001, "seconds": 9.0, **point(subject=0.61)}
    costs = {"steps": 800, "step": 0.1, "cost": 0.4, "published": 0.36}
    found = runs | {
        "batch 4, same rate": batch,
        "cost: LoRA, A100-40GB, batch 1": costs,
        "cost: LoRA, A100-40GB, batch 8": {**costs, "steps": 100, "cost": 0.1, "published": 0.13},
        "cost: LoRA, V100-16GB, batch 2": costs,
    }
    same = [vertex_quality.batch_rows(found, rule) for rule in vertex_quality.BATCHES]
    assert [list(rows.values()) for rows in same] == [[batch]] * 3, "at the reference batch all rules are one run"
    told = "\n".join(vertex_quality.page(found))
    assert "| base | 2 | 0.500 |" in told and "| LoRA r8, 100 steps | 1 | 0.550 |" in told
    assert "| batch 4, rate by batch | 200 | 0.001 | 0.610 |" in told
    assert "| LoRA, A100-40GB, batch 8 | 100 | 0.100 | 0.100 | 0.130 | 0.250 | 0.361 |" in told
    assert "V100-16GB, batch 2" not in told, "there is no batch of 1 to compare it with"
    assert len(vertex_quality.panels(found, paths)) == 3


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


def test_the_student_page_has_means_over_seeds(tmp_path: Path) -> None:
    scores = {name: 0.5 for name in student_study.SCORES}
    counts = {"parameters": 1000, "bytes": 2000, "train_mib": 30.0}
    rows = {
        "full, seed 0": {**scores, **counts, "style": 0.5}, "full, seed 1": {**scores, **counts, "style": 0.7},
        "LoRA r1, seed 0": {**scores, **counts, "bytes": 300},
        "L4: full": {"predicted_gb": 20.7, "published_gb": 20.26, "step": 2.9, "published_step": 2.56},
    }  # fmt: skip
    found = student_study.averaged(rows)
    assert list(found) == ["full", "LoRA r1"]
    assert found["full"]["style"] == pytest.approx(0.6) and found["full"]["style_range"] == pytest.approx(0.2)
    told = "\n".join(student_study.page(found, rows))
    assert "| full | 2 | 0.500 | 0.500 | 0.600 | 0.500 | 0.500 | 0.200 |" in told and "| LoRA r1 | 0.500 |" in told
    assert "| full | 20.7 | 20.3 | 2.900 | 2.560 |" in told
    judged.chart(tmp_path / "chart.png", student_study.panels(found))
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.width > 800


def test_rows_that_are_missing_are_named() -> None:
    assert judged.lacking(["a", "b", "c"], {"b": 1}) == ["", "Not measured yet: a; c."]
    assert judged.lacking(["b"], {"b": 1}) == []


def test_strips_become_one_sheet(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (192, 64), colour).save(tmp_path / f"{name}.png")
    strips = [("first", tmp_path / "a.png"), ("gone", tmp_path / "c.png"), ("second", tmp_path / "b.png")]
    judged.sheet_of(strips, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        found = {colour: count for count, colour in sheet.getcolors(2**20)}
    assert found[(255, 0, 0)] == found[(0, 0, 255)] >= 3 * 128 * 128
    judged.sheet_of([("gone", tmp_path / "c.png")], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_fidelities_are_those_of_the_demos_encoders() -> None:
    def value(middle: float, width: float) -> Json:
        return {"value": middle, "low": middle - width, "high": middle + width}

    scores = {"subject_fidelity": {"tiny-dino": value(0.4, 0.1), "tiny-clip": value(0.9, 0.3)},
              "prompt_fidelity": {"tiny-clip": value(0.7, 0.02)}}  # fmt: skip
    found = judged.fidelities_of({"scores": scores})
    assert found == {"subject": 0.4, "subject_half": 0.1, "prompt": 0.7, "prompt_half": 0.02}


@pytest.mark.slow
def test_a_study_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's pictures are drawn once; a row that is there is not measured again."""
    monkeypatch.chdir(ROOT)
    short = ["train.steps=6", "checkpoint.every=3"]
    page = vertex_quality.run(tmp_path, 2, 5, "LoRA r8, seed 0; batch 32, rate by batch", short)
    rows = json.loads((tmp_path / "vertex_quality.json").read_text())["rows"]
    assert list(rows["LoRA r8, seed 0"]["points"]) == ["0", "3", "6"]
    assert rows["batch 32, rate by batch"]["rate"] == 0.008 and 0 < rows["batch 32, rate by batch"]["subject"] < 1
    assert (tmp_path / "vertex_quality.png").exists() and (tmp_path / "vertex_quality_pictures.png").exists() is False
    monkeypatch.setattr(Studio, "tuned", lambda *_: pytest.fail("measured again"))
    assert vertex_quality.run(tmp_path, 2, 5, "LoRA r8, seed 0", short) == page


PAGES = {"vertex_quality": "docs/explanation/measurements.md", "student_study": "docs/explanation/measurements.md"}


@pytest.mark.parametrize("stem", PAGES)
def test_a_page_shows_the_committed_figures(stem: str) -> None:
    """Every line of a table whose row is measured or predicted is a line of the results."""
    results = (RESULTS / f"{stem}.md").read_text().splitlines()
    heads = [line for line in results if line.startswith("|  |")]
    lines = (ROOT / PAGES[stem]).read_text().splitlines()
    shown = [number for number, line in enumerate(lines) if line in heads]
    assert len(shown) == len(heads) >= 3
    for number in shown:
        rows = lines[number:]
        rows = rows[: next((end for end, line in enumerate(rows) if not line.startswith("|")), len(rows))]
        assert len(rows) > 3 and [row for row in rows if row not in results] == []
