"""The report: of one run and of several, of unfinished and broken ones; and that the page needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_runs import NASTY, add_images, add_prediction, add_profiles, config_of, write_run

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.runs.folder import read_metrics
from simpletune.runs.report import charts, make_report, write_report
from simpletune.runs.report.image_rows import LARGEST, ROOM, data_uri, side_for
from simpletune.runs.report.losses import mean_by_group
from simpletune.runs.report.markdown import _bars
from simpletune.runs.report.run_data import read_run
from simpletune.runs.report.settings import settings_of
from simpletune.runs.report.single_run import headline, summary_sentence
from simpletune.system.options import UserError
from simpletune.system.sheets import spread_steps
from simpletune.training.train import train

VOID = {"meta", "link", "img", "input", "br"}
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=20000 --enable-logging=stderr --dump-dom"
).split()

USING = """
const set = (query, value) => {
  const control = document.querySelector(query);
  control.value = value;
  control.dispatchEvent(new Event("input"));
};
set("#step", 0); set("#smoothing", 0.5); set("#price", 2); set(".frame input", 20);
document.getElementById("theme").click();
"""
MEASURING = "setTimeout(() => { document.documentElement.dataset.wide = document.body.scrollWidth; }, 8000)"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a report can show, and its report."""
    folder = tmp_path_factory.mktemp("report") / "runs" / "whole"
    write_run(folder, adapter={"method": "lora", "rank": 4})
    add_prediction(folder)
    add_images(folder, [NASTY, "a calm sea"])
    add_profiles(folder.parent.parent / "profiles" / "whole")
    write_report(make_report([folder], price=0.8), folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of four runs, as the study has them."""
    runs = tmp_path_factory.mktemp("several") / "runs"
    folders = [write_run(runs / "full", adapter={"method": "full"})]
    for rank, scale in ((64, 0.6), (16, 0.5), (1, 0.4)):
        folders.append(write_run(runs / f"lora-r{rank}", scale=scale, adapter={"method": "lora", "rank": rank}))
    for folder in folders:
        add_images(folder, ["a calm sea"], steps=(40,))
    write_report(make_report(folders, price=1.0), runs / "all.html")
    return runs / "all.html"


class Outline(HTMLParser):
    """What a page is made of, without what is inside its scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


def test_the_page_is_whole_in_itself_and_in_good_order(whole: Path, compared: Path) -> None:
    for file in (whole / "report.html", compared):
        text = file.read_text()
        page = Outline(text)
        assert len(text) < 3_000_000
        for attributes in page.all("img", "script", "link", "a", "iframe", "source", "video", "form"):
            for key in ("src", "href", "action", "srcset"):
                assert re.match(r"#|data:", attributes.get(key) or "#"), attributes[key]
        (policy,) = [tag["content"] or "" for tag in page.all("meta") if "http-equiv" in tag]
        assert policy.startswith("default-src 'none'; img-src data:;") and "eval" not in policy and "http" not in policy
        assert not re.search(r"@import|url\(", text[: text.index("</style>")])
        assert page.open == [] and page.all("html")[0]["lang"] == "en"
        assert len(page.all("title")) == len(page.all("h1")) == len(page.all("main")) == 1
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1 and all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
        identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
        assert len(identities) == len(set(identities))
        assert page.all("img") and all(image["alt"] for image in page.all("img"))
        for control in page.all("input"):
            assert control.get("aria-label") or control.get("id") in ("price", "smoothing", "step")
        assert {f"#{identity}" for identity in identities} >= {link["href"] for link in page.all("a")}
    script = (Path(__file__).resolve().parents[3] / "simpletune" / "assets" / "report" / "page.js").read_text()
    assert not re.search(r"fetch|XMLHttpRequest|import\(|https?:", script)


def test_one_run_is_told_whole_and_words_of_others_stay_words(whole: Path) -> None:
    text, twin = (whole / "report.html").read_text(), (whole / "report.md").read_text()
    words = " ".join("".join(Outline(text).text).split())
    for told in (words, twin.replace("\\", "")):
        assert "2.75 GiB" in told and "in stage train" in told  # the peak of the whole job
        assert "1%" in told and "1,000 of 100,000 parameters" in told
        assert "0.500 s" in told and "+2.0%" in told  # predicted against measured
        assert "aten::operator_0<int>" in told and "14.4%" in told
        assert "a made-up card" in told and "adapter.rank" in told
        assert "0.2000" in told and "1.0000 before" in told
        assert "/somewhere" not in told and "…/pictures" in told  # pages are passed on
    assert "the whole job $0.08" in twin  # 360 s at 0.8 dollars an hour
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text and NASTY[:40] in "".join(Outline(text).text)
    assert "<script>" not in twin.replace("\\<script\\>", "")
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.S)[1])
    assert set(charts) == {"loss", "lr", "grad-norm", "seconds", "stages", "kinds", "phases", "timeline"}
    (losses,) = json.loads(re.search(r'id="losses">(.*?)</script>', text, re.S)[1])
    assert losses["loss"][:2] == [1.0, pytest.approx(0.9512, abs=1e-4)] and losses["step"][-1] == 40


def test_several_runs_are_compared_with_the_first(compared: Path) -> None:
    report = make_report(sorted(compared.parent.glob("*/")))
    assert [section.title for section in report.sections][:2] == ["Runtime per epoch", "Peak memory usage"]
    runtime, peak = (section.charts[0].spec["data"]["values"] for section in report.sections[:2])
    assert [row["label"] for row in runtime] == ["2.00 s (100%)", "0.800 s (40%)", "1.00 s (50%)", "1.20 s (60%)"]
    assert peak[1]["label"] == "1.10 GiB (40%)" and peak[1]["value"] == pytest.approx(1.1)
    differences = next(section for section in report.sections if section.name == "differences").tables[0]
    assert ("adapter.method", "full", "lora", "lora", "lora") in differences.rows
    assert report.facts[0].value == "1.10 GiB" and "lora-r1" in report.facts[0].note
    (row,) = report.data["grid"]
    assert [image["name"] for image in row["pictures"]] == ["base", "full", "lora-r1", "lora-r16", "lora-r64"]
    assert not report.status


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", gpu=False, data={"path": "x", "resolution": 512})]
    report = make_report(folders)
    assert any("differ in data.path, data.resolution" in note for note in report.status)
    assert any("different machines" in note for note in report.status)
    peak = next(section for section in report.sections if section.name == "peak")
    assert "Do not compare" in peak.notes[0] and "%" not in peak.charts[0].spec["data"]["values"][1]["label"]
    folders = [write_run(tmp_path / place / "same") for place in ("one", "two")]
    names = [row["name"] for row in make_report(folders).sections[0].charts[0].spec["data"]["values"]]
    assert names == [str(folder) for folder in folders]


def test_what_measured_nothing_divides_nothing(tmp_path: Path) -> None:
    """Stages that allocated nothing, phases that round to 0 ms, losses of 0: a page, without percentages of nothing."""
    folder = write_run(tmp_path / "runs" / "nothing")
    add_prediction(folder)
    summary = json.loads((folder / "summary.json").read_text())
    stages = {name: stage | {"peak_allocated_gib": 0.0} for name, stage in summary["stages"].items()}
    zeros = dict.fromkeys(("seconds_per_step", "samples_per_second", "peak_allocated_gib", "peak_reserved_gib"), 0.0)
    (folder / "summary.json").write_text(json.dumps(summary | zeros | {"stages": stages}))
    add_profiles(tmp_path / "profiles" / "nothing", epochs=(0,))
    profile = tmp_path / "profiles" / "nothing" / "epoch-000" / "summary.json"
    values = json.loads(profile.read_text())
    profile.write_text(json.dumps(values | {"phases": dict.fromkeys(values["phases"], 1e-7)}))
    (folder / "evaluations.jsonl").write_text("".join(f'{{"step": {n}, "eval_loss": 0.0}}\n' for n in (0, 40)))
    make_report([folder, write_run(tmp_path / "runs" / "other")])
    write_report(make_report([folder]), folder / "report.html")
    assert "0.0000 before, at step 40" in (folder / "report.md").read_text().replace("\\", "")


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "killed", steps=9, finished=False)
    with open(folder / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 10, "lo')
    report = make_report([folder])
    assert "9 of 40 steps" in report.status[0] and "not recorded" in report.status[0]  # of an older version
    facts = {fact.name: fact.value for fact in report.facts}
    assert facts["Peak of the whole job"] == "not known" and facts["Seconds per step"] == "0.500 s"
    write_report(report, folder / "report.html")
    assert "No peak was recorded" in (folder / "report.md").read_text()
    resumed = write_run(tmp_path / "resumed", steps=20)  # its summary is of an earlier end
    rows = [json.dumps({**row, "step": row["step"] + 5}) + "\n" for row in read_metrics(resumed)]
    (resumed / "metrics.jsonl").write_text("".join(rows))
    assert any("outdated, from step 20" in note for note in make_report([resumed]).status)


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "broken")
    text = (folder / "metrics.jsonl").read_text().splitlines()
    text[3], text[5] = "}{", text[5].replace('"loss": 0', '"loss": NaN, "x": 0')
    text[7], text[9] = "[" * 100_000, f'{{"step": 10, "loss": 1{"0" * 400}}}'  # too deep, and no float
    (folder / "metrics.jsonl").write_text("\n".join(text))
    (folder / "summary.json").write_text("{")
    (folder / "config.json").write_text(json.dumps({"name": "old", "rank": 3}))
    report = make_report([folder])
    told = " ".join(report.status)
    assert "metrics.jsonl: ignored 4 lines" in told
    assert "summary.json cannot be read" in told and "config.json" in told
    write_report(report, folder / "report.html")
    for name in ("config.json", "metrics.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    write_report(make_report([folder]), folder / "report.html")
    assert "No step was recorded." in (folder / "report.md").read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "demo")
    with pytest.raises(UserError, match=r"is not a run: .* Did you mean .*demo\?"):
        make_report([tmp_path / "runs"])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder. Name a run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--out", "page.pdf"])
    assert "does not end in .html" in capsys.readouterr().err


def test_the_verb_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs" / "demo")
    assert main(["report", str(folder), "--price", "2.5"]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "report.html"), str(folder / "report.md")]
    assert main(["report", str(folder), str(folder), "--out", str(tmp_path / "new" / "two.html")]) == 0
    assert "(2)" in (tmp_path / "new" / "two.md").read_text()


def test_settings_and_their_defaults() -> None:
    config = config_of("x", precision={"weights": "int8"}, ema={"decay": 0.99})
    rows = {row.path: row for row in settings_of(config, {})}
    weights, rank = rows["precision.weights"], rows["adapter.rank"]
    assert (weights.value, weights.default, weights.changed) == ("int8", "bf16", True)
    assert (rank.value, rank.default, rank.changed) == ("16", "16", False) and rank.says
    assert rows["name"].changed and rows["name"].default == ""
    assert rows["ema.decay"].value == "0.99"
    assert not rows["train.clip_norm"].changed and "version" not in rows


def test_pictures_fit_into_a_page(tmp_path: Path) -> None:
    from PIL import Image

    assert side_for(8) == LARGEST and 128 <= side_for(500) < 256
    assert all(count * side_for(count) ** 2 // 5 <= ROOM for count in (10, 100, 300))
    assert spread_steps(list(range(1, 101)), 4) == [1, 34, 67, 100] and spread_steps([5, 9], 4) == [5, 9]
    gradient = Image.linear_gradient("L").resize((1024, 768))
    gradient.save(tmp_path / "large.png")
    uri = data_uri(tmp_path / "large.png")
    assert uri.startswith("data:image/webp;base64,") and len(uri) < 20_000


def test_long_runs_are_thinned_and_drawn_as_text() -> None:
    rows = [{"step": step, "loss": float(step)} for step in range(1, 101)]
    assert [(row["step"], row["loss"]) for row in mean_by_group(rows, 2)] == [(50, 25.5), (100, 75.5)]
    assert mean_by_group(rows, 100) is rows
    assert charts.sparkline([0.0, 0.5, 1.0]) == "▁▅█" and len(charts.sparkline([1.0] * 5000)) <= 60


def test_names_of_phases_do_not_overlap() -> None:
    """At the width of a phone: noise and loss are short phases before long ones."""
    spans = {"data": 4.0, "noise": 2.0, "forward": 130.0, "loss": 3.0, "backward": 210.0, "clip": 1.0, "optimizer": 3.0}
    phases, at = [], 0.0
    for name, ms in spans.items():
        phases.append({"name": name, "from": at, "to": at + ms, "peak": 100.0})
        at += ms
    lanes = charts.label_lanes(phases)
    assert sorted(row["name"] for lane in lanes.values() for row in lane) == sorted(spans)
    for lane in lanes.values():
        taken = 0.0
        for row in lane:
            wide = 6 * len(row["name"])
            left = row["at"] / at * 280 - (wide if row["end"] else 0)
            assert left >= taken and left + wide <= 281, row
            taken = left + wide
    many = [
        {**phase, **{end: n * 10 + phase[end] / 40 for end in ("from", "to")}} for n in range(30) for phase in phases
    ]
    assert max(charts.label_lanes(many)) < charts.LANES  # of many accumulated batches some names are left out


@pytest.mark.parametrize("broken", [False, True])
def test_a_run_ends_with_its_report(
    broken: bool, tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a report that fails is a warning."""

    def fail(folder: Path) -> Path:
        raise ValueError("no page today")

    if broken:
        monkeypatch.setattr("simpletune.runs.report.report_at_end", fail)
    tiny_config["output"]["report"] = True
    tiny_config["validation"] = {"prompts": ["a red disc"], "steps": 1, "guidance": 1, "every": 2, "loss_samples": 2}
    folder = train(validate(tiny_config, "test"))
    assert (folder / "report.html").exists() is not broken
    summary = json.loads((folder / "summary.json").read_text())
    if broken:
        assert summary["warnings"] == ["the report failed (ValueError: no page today)"]
        return
    assert f"report       {folder / 'report.html'}" in capsys.readouterr().out
    steps = [row["step"] for row in map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())]
    assert steps == [0, 2, 4]
    twin = (folder / "report.md").read_text().replace("\\", "")
    assert "torch" in twin and "resident, the whole process" in twin and "samples/grid.png" in twin


def test_the_subtitle_counts_the_steps_that_the_result_has_seen(tmp_path: Path) -> None:
    """A run that stopped after 40 steps, finished from its checkpoint of step 36."""
    folder = write_run(tmp_path / "early")
    summary = json.loads((folder / "summary.json").read_text())
    early = {"steps": 36, "status": "finished early at step 36 of 40"}
    (folder / "summary.json").write_text(json.dumps(summary | early))
    assert summary_sentence(read_run(folder)).endswith(", 36 steps")
    (folder / "summary.json").unlink()
    assert summary_sentence(read_run(folder)).endswith(", 40 steps")


def test_the_loss_is_that_of_steps_that_the_result_has_seen(tmp_path: Path) -> None:
    """A run without evaluations that stopped after 40 steps, finished from its checkpoint of step 36."""
    folder = write_run(tmp_path / "early")
    (folder / "evaluations.jsonl").unlink()
    rows = [{"step": step, "loss": 0.25 if step <= 36 else 9.0} for step in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((folder / "summary.json").read_text())
    early = {"steps": 36, "status": "finished early at step 36 of 40", "eval_loss_after": None}
    (folder / "summary.json").write_text(json.dumps(summary | early))
    (loss,) = (fact for fact in headline(read_run(folder)) if fact.name == "Loss")
    assert (loss.value, loss.note) == ("0.2500", "mean of the last 3 steps")


@pytest.mark.parametrize("which", ["one", "several"])
def test_a_browser_draws_it_and_asks_for_nothing(which: str, whole: Path, compared: Path, tmp_path: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs Chromium or Chrome")
    source = whole / "report.html" if which == "one" else compared
    page = tmp_path / "page.html"
    using = USING if which == "one" else ""
    text, _, end = source.read_text().rpartition("</body>")
    text = text.replace("<style>", "<style>html { width: 390px; }", 1)
    page.write_text(f"{text}<script>setTimeout(() => {{ {using} }}, 3000); {MEASURING}</script></body>{end}")
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900"]
    done = subprocess.run([chromium, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == [], said  # a blocked request would be said here, too
    outline = Outline(done.stdout)
    assert outline.all("html")[0]["data-drawn"] == "yes"
    charts = [tag for _, tag in outline.tags if "data-chart" in tag]
    drawings = [tag for tag in outline.all("svg") if "marks" in (tag.get("class") or "")]
    assert len(drawings) == len(charts) == (8 if which == "one" else 3)
    assert 0 < int(outline.all("html")[0]["data-wide"] or 0) <= 390  # nothing is wider than a phone
    if which == "one":
        assert outline.all("html")[0]["data-theme"] == "dark"  # it was light, and the button was pressed
        text = " ".join("".join(outline.text).split())
        assert "step 20" in text and "the whole job $0.2" in text and "Smoothing 0.50" in text
        assert any(tag.get("style") == "--cut: 20%;" for tag in outline.all("div"))


def test_a_bar_without_a_number_is_empty() -> None:
    rows: list[dict[str, object]] = [
        {"name": "a", "value": 2, "label": "2 GiB"}, {"name": "b", "value": None, "label": "?"},
        {"name": "c", "value": 0, "label": "0"},
    ]  # fmt: skip
    bars = [line for line in _bars(rows, "") if line[:3] in ("a  ", "b  ", "c  ")]
    assert ["█" in bar for bar in bars] == [True, False, False]
