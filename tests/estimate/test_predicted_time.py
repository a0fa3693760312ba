"""A run's time and price: what a job consists of, what is kept when it starts, and what stands beside it at its end."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recorded_runs import write_run

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.estimate import run_estimate as forecasting
from simpletune.estimate.disk_needs import DataCounts
from simpletune.estimate.job_estimate import Estimate
from simpletune.estimate.job_time import WRITE_PNG, job_time, times_due
from simpletune.estimate.simulate.reports import SIMULATED, JobReport, StepReport
from simpletune.estimate.timing.constants import Constants, Grid, constants_file, write_constants
from simpletune.estimate.timing.datasheet import CORE
from simpletune.estimate.timing.sections import KernelWork, StreamWork
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.runs.folder import PLANNED, PREDICTED, predicted_time, put_predicted
from simpletune.runs.report import make_report
from simpletune.runs.report.markdown import markdown
from simpletune.runs.summary import compare_with_measured, time_lines
from simpletune.stages.plan_data import plan_data
from simpletune.system.atomic import write_json
from simpletune.system.environment import cpu_name
from simpletune.system.gpus import card_named_by_driver, find_card
from simpletune.system.options import Json
from simpletune.system.prices import card_price
from simpletune.training.prepare import prepare_only
from simpletune.training.train import train

L4 = find_card("L4")
BYTES = 10**9  # of traffic in each recorded part; an L4 moves 255 of them a second
SECONDS = 10**9 / (0.85 * 300e9) + 2.5e-6
COUNTS = DataCounts(8, 8, 8 * 32**2, 8)


def a_job(*parts: str) -> JobReport:
    """A job whose parts move the same bytes once each; pictures when sampled, for all simulated steps, and decoded."""

    def moved(phase: str = "") -> StreamWork:
        return StreamWork("compute", phase, "", work=Counter({KernelWork("add", "bf16", (BYTES,)): 1}))

    snapshot = MemorySnapshot(0, {}, "", "")
    step = StepReport(snapshot, {}, snapshot, 0, 0, {}, 0, 0, 0, 0.0, [moved()])
    work = {part: [moved("sample"), moved("decode")] if part in ("draw", "class") else [moved()] for part in parts}
    return JobReport({}, step, {}, work)


def seconds_of(config: dict, part: str, stage: str, changes: dict | None = None, counts: DataCounts = COUNTS) -> float:
    """Seconds of a stage in a job with one part."""
    data = copy.deepcopy(config) | (changes or {})
    return job_time(validate(data, "x"), a_job(part, "latents"), L4, counts).stages.get(stage, 0.0)


def test_class_pictures_are_timed(tiny_config: dict) -> None:
    def drawn(**changes: object) -> float:
        prior = {"method": "class_pictures", "prompt": "a shape", "steps": 2 * SIMULATED, "count": 10} | changes
        return seconds_of(tiny_config, "class", "class", {"prior": prior})

    assert seconds_of(tiny_config, "class", "class") == 0
    load = drawn() - (drawn(count=20) - drawn())
    assert drawn(count=20) - drawn() == pytest.approx(10 * (2 + 1) * SECONDS, rel=0.02)  # sampling, decoding; a PNG
    assert 0 < load < 0.1 * drawn()
    assert drawn(steps=4 * SIMULATED) - drawn() == pytest.approx(10 * 2 * SECONDS)


def test_pictures_are_drawn_at_the_start_between_and_at_the_end(tiny_config: dict) -> None:
    def drawn(**option: object) -> float:
        changes = {"validation": {"steps": SIMULATED, "loss_samples": 0} | option, "train": {"steps": 10}}
        return seconds_of(tiny_config, "draw", "validate", changes)

    once = 2 * SECONDS + 32**2 * WRITE_PNG  # for a picture
    assert drawn(prompts=["a", "b"], every=None) == pytest.approx(2 * 2 * once, rel=0.02)
    assert drawn(prompts=["a", "b"], every=5) == pytest.approx(3 * 2 * once, rel=0.02)
    assert drawn(prompts=["a", "b"], every=4) == pytest.approx(4 * 2 * once, rel=0.02)
    assert drawn(every=None) == pytest.approx(2 * once, rel=0.02)  # the caption of a picture


def test_drift_takes_passes_for_each_group_of_prompts(tiny_config: dict) -> None:
    def evaluated(**option: object) -> float:
        validation = {"prompts": [], "loss_samples": 4, "every": None, "unrelated_prompts": []} | option
        changes = {"validation": validation, "train": {"steps": 10}, "checkpoint": {"every": None}}
        return seconds_of(tiny_config, "evaluate", "validate", changes)

    assert evaluated() == pytest.approx(2 * 4 * SECONDS)  # before and after
    assert evaluated(class_prompt="a shape", unrelated_prompts=["a tree"]) == pytest.approx(3 * evaluated())


def test_every_checkpoint_is_saved_and_what_is_cached_takes_no_time(tiny_config: dict) -> None:
    def saved(every: int | None) -> float:
        return seconds_of(tiny_config, "draw", "save", {"checkpoint": {"every": every}, "train": {"steps": 10}})

    assert [times_due(every, 1000) for every in (None, 1000, 500, 300, 1)] == [1, 1, 2, 4, 1000]
    one = saved(5) - saved(None)
    assert one > 0 and saved(2) - saved(None) == pytest.approx(4 * one)
    assert seconds_of(tiny_config, "text.clip", "text") > SECONDS / 2
    cached = COUNTS._replace(prompts=0, pixels=0)
    assert seconds_of(tiny_config, "text.clip", "text", counts=cached) == 0
    assert seconds_of(tiny_config, "draw", "latents", counts=cached) == 0 < seconds_of(tiny_config, "draw", "latents")


def test_the_price_of_a_card_as_the_driver_names_it(tmp_path: Path) -> None:
    known = card_price(card_named_by_driver("NVIDIA A100-SXM4-80GB", 79 * 2**30, (8, 0)))
    assert known is not None and known.per_hour == 1.79
    assert card_price(card_named_by_driver("NVIDIA A2", 15 * 2**30, (8, 6))) is None
    prices = tmp_path / "prices.json"
    prices.write_text('{"RTX3060-6GB": {"per_hour": 0.1, "as_of": "2026-11", "source": "ours"}}')
    assert card_price(find_card("RTX3060-12GB"), str(prices)) is None
    small = card_price(card_named_by_driver("NVIDIA GeForce RTX 3060", 12 * 2**30, (8, 6)), str(prices))
    assert small is not None and small.per_hour == 0.1  # the only one of that name with a price


def test_a_run_on_a_card_is_priced_before_it_starts_by_the_users_prices_first(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = card_named_by_driver("NVIDIA L4", L4.bytes, (8, 9))
    monkeypatch.setattr(forecasting, "card_at_hand", lambda device: (card, 0))
    monkeypatch.setattr(forecasting.DataCounts, "from_uncached", lambda config, plan: COUNTS)
    hosts = [HostSpeeds(core=CORE)] * 9
    monkeypatch.setattr(forecasting, "measure_host", lambda device: hosts.pop())
    prediction = Estimate(a_job("latents"), (32, 32))

    def found(**output: str) -> Json:
        changes = {"train": {"steps": 100}, "output": {**tiny_config["output"], **output}}
        config = validate(tiny_config | changes, "x")
        time = forecasting.estimate_time(config, prediction, torch.device("cuda"), None)  # type: ignore[arg-type]
        assert time is not None
        return time

    shipped = found()
    assert len(hosts) == 8, "this machine is measured"
    assert shipped["price"]["per_hour"] == 0.7068
    assert shipped["seconds_per_step"] == pytest.approx(SECONDS, rel=0.02)
    assert shipped["cost"] == pytest.approx(shipped["seconds"] * 0.7068 / 3600, abs=1e-4)
    out = capsys.readouterr().out
    assert "time    predicted 4 ms a step (3 ms to 8 ms, by its data sheet" in out and "0.7068 USD per hour" in out
    mine, given = tmp_path / "mine.json", tmp_path / "given.json"
    mine.write_text('{"L4": {"per_hour": 0.25, "as_of": "2026-11", "source": "our cluster"}}')
    price = found(prices=str(mine))["price"]
    assert price["per_hour"] == 0.25 and price["source"] == "our cluster"
    assert "0.25 per hour, as of 2026-11, our cluster" in capsys.readouterr().out
    assert card_price(L4, str(mine)).per_hour == 0.25  # type: ignore[union-attr]
    given.write_text('{"L4": {"per_hour": 0.5, "as_of": "2026-11", "source": "given"}}')
    assert card_price(L4, str(mine), given).per_hour == 0.5  # type: ignore[union-attr]
    mine.write_text('{"L4": {"per_hour": 0.25}}')
    assert "price" not in found(prices=str(mine))
    assert f"warning the price is not predicted: output.prices: {mine}: L4.as_of" in capsys.readouterr().out


def test_what_is_prepared_already_is_not_counted_again(tiny_config: dict, tmp_path: Path) -> None:
    tiny_config["output"]["cache"] = str(tmp_path)
    config = resolve_folders(validate(tiny_config, "x"))
    plan = plan_data(config).plan
    before = DataCounts.from_uncached(config, plan)
    whole = DataCounts.from_plan(config, plan)
    assert before.pixels == whole.pixels > 0 and before.prompts >= whole.prompts > 0
    prepare_only(config)
    assert DataCounts.from_uncached(config, plan) == before._replace(prompts=0, pixels=0)
    assert before.steps == plan.steps_per_epoch


def test_an_epoch_has_the_steps_of_its_buckets_and_a_faster_card_s_take_less(tiny_config: dict) -> None:
    config = validate(tiny_config | {"train": {"epochs": 3, "batch_size": 4}}, "x")
    assert job_time(config, a_job("latents"), L4, COUNTS).steps == 3 * 2  # 8 samples, 4 at once
    assert job_time(config, a_job("latents"), L4, COUNTS._replace(steps=5)).steps == 3 * 5
    slow, fast = (job_time(config, a_job(), replace(L4, bandwidth=b)).step.seconds for b in (300, 600))
    assert slow == pytest.approx(2 * fast, rel=0.01)


def a_prediction(**changes: object) -> dict:
    price = {"per_hour": 3.6, "as_of": "2026-11", "source": "a test", "currency": "USD"}
    return {
        "device": "NVIDIA L4", "seconds_per_step": 0.4, "seconds_per_step_range": [0.3, 0.8], "steps": 40,
        "seconds_by_stage": {"text": 6.0, "load": 2.0, "train": 1.5, "class": 9.0}, "speeds": "by its data sheet",
        "bound_by": "products", "price": price, **changes,
    }  # fmt: skip


def test_a_prediction_stands_beside_what_the_run_took(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")  # 0.5 s a step, 3 s a stage, 360 s in all
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    assert compare_with_measured(run, summary) is None
    put_predicted(run, 40, 4, None, a_prediction())
    found = compare_with_measured(run, summary)
    assert found is not None and found["seconds_per_step"] == {"predicted": 0.4, "measured": 0.5, "ratio": 0.8}
    assert {name: pair["ratio"] for name, pair in found["stages"].items()} == {"text": 2.0, "train": 0.5}
    assert found["seconds"] == {"predicted": 7.5, "measured": 6.0, "ratio": 1.25}
    assert found["cost"] == {"predicted": pytest.approx(0.0075), "measured": pytest.approx(0.36), "ratio": 0.021}
    first, second = time_lines(found)
    assert "0.4 s a step, measured 0.5 (0.80)" in first and "8 s of 6 s for text, train (1.25)" in first
    assert "0.0075 USD" in second and "0.36" in second
    file.write_text(json.dumps(summary | {"predicted_time": found}))
    text = markdown(make_report([run]))
    assert "| text | 6.00 s | 3.00 s | 2.00 |" in text and "| price | 0.0075 USD | 0.36 USD | 0.02 |" in text
    assert "expected between 0.300 s and 0.800 s, bound by products" in text


def test_another_length_is_compared_by_its_step_and_a_damaged_prediction_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=20)
    summary = json.loads((run / "summary.json").read_text())
    put_predicted(run, 20, 4, None, a_prediction())
    found = compare_with_measured(run, summary)
    assert found is not None and found["seconds_per_step"]["ratio"] == 0.8 and not {"stages", "seconds"} & set(found)
    assert len(list(time_lines(found))) == 1
    for damaged in ('{"seconds_per_step": "fast"}', '{"steps": 20, "time": {"seconds_per_step": "fast"}}'):
        (run / PREDICTED).write_text(damaged)
        assert compare_with_measured(run, summary) is None
        assert "predicted.json is damaged" in capsys.readouterr().out and not (run / PREDICTED).exists()


def test_one_file_keeps_what_is_planned_and_predicted(tmp_path: Path) -> None:
    """A resumed run plans and predicts its memory anew, and keeps the time of its first start; so does one whose files
    are by an earlier version, which wrote two."""
    write_json(tmp_path / PREDICTED, a_prediction())
    write_json(tmp_path / PLANNED, {"steps": 40, "steps_per_epoch": 4, "predicted": {}})
    put_predicted(tmp_path, 60, 4, {"train": {"bytes": 7}}, None)
    kept = {"steps": 60, "steps_per_epoch": 4, "memory": {"train": {"bytes": 7}}, "time": a_prediction()}
    assert [file.name for file in tmp_path.iterdir()] == ["predicted.json"]
    assert json.loads((tmp_path / PREDICTED).read_text()) == kept
    put_predicted(tmp_path, 80, 4, None, None)
    assert json.loads((tmp_path / PREDICTED).read_text()) == kept | {"steps": 80, "memory": None}
    (tmp_path / PREDICTED).unlink()
    put_predicted(tmp_path, 80, 4, None, None)
    assert predicted_time(tmp_path) is None


def calibrated(config: TrainConfig) -> None:
    """A calibration of this CPU in the run's cache."""
    grids = {"add.fp32": Grid(axes={"bytes": [1000, 10**6]}, seconds=[1e-6, 1e-4])}
    several = dict.fromkeys(("product", "convolution"), "mnk") | dict.fromkeys(("attention", "attention_both"), "hqkd")
    for kind, axes in several.items():
        grids[f"{kind}.fp32"] = Grid(axes=dict.fromkeys(axes, [16, 64]), seconds=[1e-6] * 2 ** len(axes))
    constants = Constants(
        version=1, device=cpu_name(), kind="cpu", capability=None, memory_bytes=None, threads=torch.get_num_threads(),
        date="2026-11-22", versions="", seconds=1.0, grids=grids,
        host=dict.fromkeys(("operation", "view", "recorded", "backward", "module", "function", "function_backward",
                            "recomputed"), 1e-6),
    )  # fmt: skip
    write_constants(constants_file(Path(config.output.cache), cpu_name(), torch.get_num_threads(), "cpu"), constants)


def test_a_run_keeps_its_predicted_time_from_its_first_start(
    tiny_config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config["output"]["cache"] = str(tmp_path)  # which others must not find calibrated
    tiny_config["train"]["steps"] = 2
    tiny_config["checkpoint"] = {"every": 1}
    tiny_config["speed"] = {"threads": torch.get_num_threads()}
    config = validate(tiny_config, "test")
    calibrated(config)
    folder = train(config, estimate_first=True)
    file = json.loads((folder / PREDICTED).read_text())
    kept = file["time"]
    assert file["steps"] == kept["steps"] == 2 and "train" in file["memory"]
    assert kept["seconds_by_stage"] == {"train": pytest.approx(2 * kept["seconds_per_step"], 0.1)}
    summary = json.loads((folder / "summary.json").read_text())
    pair = summary["predicted_time"]["seconds_per_step"]
    assert pair == {"predicted": kept["seconds_per_step"], "measured": summary["seconds_per_step"],
                    "ratio": round(kept["seconds_per_step"] / summary["seconds_per_step"], 3)}  # fmt: skip
    out = capsys.readouterr().out
    assert "time    predicted" in out and f"measured {summary['seconds_per_step']:.3g}" in out
    (folder / "summary.json").unlink()
    monkeypatch.setattr(forecasting, "estimate_time", lambda *_: {**kept, "steps": 99})
    train(config, resume="latest", estimate_first=True)
    assert json.loads((folder / PREDICTED).read_text()) == file


def test_an_unreadable_calibration_stops_no_run(
    tiny_config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config["output"]["cache"] = str(tmp_path)
    config = validate(tiny_config, "test")
    file = constants_file(Path(config.output.cache), cpu_name(), torch.get_num_threads(), "cpu")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    plan = type("Plan", (), {"largest": lambda self: (32, 32), "steps_per_epoch": 1})()
    assert forecasting.estimate_time(config, None, torch.device("cpu"), plan) is None  # type: ignore[arg-type]
    assert "the time is not predicted" in capsys.readouterr().out


def test_a_larger_batch_is_possible_by_rules_data_and_memory(tiny_config: dict) -> None:
    job = a_job()
    job.train.sections[0].host["operation"] = 1000  # 10 ms, and 4 of traffic
    half = replace(job.train, phases={"forward": MemorySnapshot(2 * 2**30, {"activations": 2 * 2**30})})
    job, card = replace(job, train=half), replace(L4, bandwidth=3000.0)

    def found(counts: DataCounts | None = None, reserved: int = 0, **train: object) -> Json | None:
        config = validate(tiny_config | {"train": {"steps": 9, "batch_size": 2} | train}, "x")
        data = job_time(config, job, card, counts, reserved=reserved).as_json()
        assert data["limited_by"] == "host"
        return data["larger_batch"]  # type: ignore[return-value]

    larger = found()
    assert larger is not None and larger["batch_size"] == 8 and larger["words"].startswith("train.batch_size=8: ")
    for less in (found(reserved=16 * 2**30), found(COUNTS._replace(samples=7, pixels=0)), found(global_batch=4)):
        assert less is not None and less["batch_size"] == 4
    assert found(global_batch=2) is None and found(COUNTS._replace(samples=3, pixels=0)) is None
