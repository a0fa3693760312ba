"""Predicted seconds and prices beside published ones: the rows, how a row is predicted, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import hours, hours_tables, predicted_seconds
from benchmarks.hours_tables import OUTSIDE, is_within, ratio_of, why_outside
from benchmarks.predicted_seconds import (
    H100_PCIE,
    card_named,
    config_of,
    diffusers_blocks,
    images,
    of_step,
    predicted,
    record_encoding,
    record_step,
)
from benchmarks.published import IMAGES, RATE, STEP, Row, rows
from simpletune.config.load import validate
from simpletune.estimate.job_time import step_range
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import OTHERWISE, OTHERWISE_GEFORCE, PRODUCTS, DatasheetSpeeds, products_of
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds
from simpletune.runs.report import page as report_page
from simpletune.runs.report.markdown import markdown
from simpletune.system.gpus import CARDS, find_card
from simpletune.system.options import Json

RESULTS = Path(hours.__file__).parent / "results" / "cpu"
L4 = find_card("L4")


def test_every_row_has_a_source_a_card_and_a_configuration() -> None:
    found = list(rows())
    assert len({row.key for row in found}) == len(found) > 30
    for row in found:
        card = card_named(row.card)
        config = config_of(row.config, row.overrides, card)
        assert row.group in hours_tables.TITLES and row.group in hours_tables.WHY and row.value > 0
        assert config.precision.settled_compute != "bf16" or card.has_bf16, row.key
    assert [row.key for row in found if row.goal and row.group == "mosaic"] == [
        f"mosaic: {side} px, latents prepared, A100-40GB" for side in (256, 512)
    ]
    assert {row.card for row in found if row.group == "serving"} == {"T4", "V100-16GB", "A100-40GB"}
    plain, faster = (next(row for row in found if row.name.startswith(name)) for name in ("plain", "optimised"))
    assert plain.unit == IMAGES and plain.stores_scores and not faster.stores_scores
    row = next(row for row in found if row.key == "sweep: SD3.5 Medium, all checkpointed, L40S")
    config = config_of(row.config, row.overrides, card_named(row.card))  # as the peer's example says
    assert (config.data.resolution, config.train.batch_size, config.adapter.rank) == (1024, 3, 128)  # type: ignore[union-attr]
    assert config.model.text.tokens == 77 + 154 and config.memory.checkpointing == "all"
    trained = config.adapter.modules(config.model.architecture.known_shapes())  # type: ignore[union-attr]
    assert all(name.endswith(("to_q", "to_k", "to_v", "to_out.0")) for name in trained)
    assert len(trained) == 4 * (24 + 13)  # SD3.5 Medium has a second attention in 13 blocks


def test_micro_batches_are_counted_without_simulating_each(tiny_config: dict) -> None:
    speeds = DatasheetSpeeds(L4)
    for count in (1, 3):
        config = validate(tiny_config | {"train": {"steps": 1, "gradient_accumulation": count}}, "x")
        whole = step_seconds(simulate(config, capability=L4.capability).sections, speeds).seconds
        assert of_step(record_step(config, L4), count, speeds)[1] == pytest.approx(whole, rel=0.02)


def test_what_a_source_does_in_its_step_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepSeconds(2.0, {"products": 2.0}, 0.0, 0.0)
    monkeypatch.setattr(predicted_seconds, "record_step", lambda *_: [])
    monkeypatch.setattr(predicted_seconds, "of_step", lambda *_: (step, 2.0))
    monkeypatch.setattr(predicted_seconds, "record_encoding", lambda _: lambda _: 0.5)
    settings = ("train.batch_size=4", "train.gradient_accumulation=2")

    def row(unit: str, inside: bool) -> Row:
        return Row("vertex", "x", "L4", 10.0, unit, hours.SD15, settings, inside=inside)

    assert predicted(row(STEP, False))["predicted"] == 2 and predicted(row(STEP, True))["predicted"] == 6
    found = predicted(row(RATE, True))
    assert found["predicted"] == pytest.approx(8 * 8 / 6) and found["inside"] == 4
    assert ratio_of(row(RATE, True), found) == pytest.approx(10 * 6 / 64)  # seconds, not rates
    assert ratio_of(row(STEP, True), {"predicted": 6.0}) == 0.6


def test_pictures_and_encoding_follow_from_recorded_work(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(steps: int, stores: bool = False) -> Json:
        prior = {"method": "class_pictures", "prompt": "a shape", "steps": steps}
        return images(validate(tiny_config | {"prior": prior}, "x"), L4, stores)(DatasheetSpeeds(L4))

    one, two = drawn(10), drawn(20)
    assert two["predicted"] - one["predicted"] == pytest.approx(10 * one["step"], rel=0.05)
    assert drawn(10, stores=True)["predicted"] > one["predicted"]
    config = validate(tiny_config, "x")
    monkeypatch.setattr("simpletune.estimate.timing.datasheet.LAUNCH", 0.0)  # the host bounds the tiny model
    monkeypatch.setattr(DatasheetSpeeds, "host", lambda *_: 0.0)
    encoded = record_encoding(config)
    assert 0 < encoded(DatasheetSpeeds(find_card("H100"))) < encoded(DatasheetSpeeds(find_card("RTX2060")))


def test_published_rows_run_diffusers_blocks_and_have_the_range_that_estimate_states(
    tiny_config: dict, three_blocks: Path, write_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = {"pretrained": str(three_blocks), "t5_length": 8}, tiny_config["data"] | {"resolution": 64}
    file = write_config(tiny_config | {"model": model, "data": data})
    config, speeds = config_of(file, (), L4), DatasheetSpeeds(L4)
    with diffusers_blocks():
        sections = simulate(config, capability=L4.capability).sections
    found = predicted(Row("study", "x", "L4", 1.0, STEP, file, ()))
    whole = step_seconds(sections, speeds)
    low, high = step_range(sections, speeds, whole)
    assert found["step"] == found["predicted"] == whole.seconds
    assert found["range"] == pytest.approx([low * found["predicted"], high * found["predicted"]])
    step = hours.step_row("L4", file, ())
    assert step["range"][0] < step["step"] < step["range"][1]
    assert found["step"] != pytest.approx(step["step"], rel=0.03), "those of our own blocks"
    monkeypatch.setattr(predicted_seconds, "record_step", lambda *_: [sections])
    rate = predicted(Row("study", "x", "L4", 1.0, RATE, file, ()))
    assert rate["range"][0] < rate["predicted"] < rate["range"][1]  # of pictures a second: the slow end first
    assert rate["predicted"] / rate["range"][0] == pytest.approx(high)


def test_rows_outside_their_range_are_explained_and_no_others() -> None:
    found = json.loads((RESULTS / "hours.json").read_text())["rows"]
    outside = [row for row in rows() if not is_within(row, found[row.key])]
    assert {why_outside(row) for row in outside} == set(OUTSIDE.values())


def test_the_page_counts_rows_that_are_as_published() -> None:
    """Made of the committed rows it is test_pages.py's."""
    found: dict[str, Json] = {
        row.key: {"predicted": row.value, "range": [0.7 * row.value, 2 * row.value], "step": 1.0, "inside": 0.25,
                  "bound": "bytes"}
        for row in rows()
    }  # fmt: skip
    others = json.loads((RESULTS / "hours.json").read_text())["rows"]
    assert set(hours.jobs({})) == {*found, *others}
    told = markdown(hours.page(others | found))
    assert "within 25% | **7 of 7**" in told and "| missed |" not in told
    assert f"within the stated range | **{len(found)} of {len(found)}**" in told and "Outside" not in told
    encoding = "mosaic: 512 px, encoding in every step, A100-40GB"
    page = hours.page(others | found | {encoding: {**found[encoding], "range": [70.0, 110.0]}})
    assert page.facts[2].value == f"{len(found) - 1} of {len(found)}"
    explained = next(section for section in page.sections if section.name == "mosaic").tables[1].rows
    assert explained == [("512 px, encoding in every step, A100-40GB", OUTSIDE["mosaic: 512 px, encoding"])]
    slow = {key: {**row, "predicted": 9 * row["predicted"]} for key, row in found.items()}
    assert hours.page(slow).facts[0].value == "0 of 7"


def test_a_page_of_some_rows_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "vega_bundle", str)
    monkeypatch.setattr(hours, "jobs", lambda _: {"card: L4, 256 px": lambda: {"step": 0.1234567, "bound": "bytes"}})
    page = hours.run(tmp_path, 1.0, "")
    assert page == tmp_path / "hours.html" and (tmp_path / "hours.md").is_file()
    assert "0.12346" in (tmp_path / "hours.json").read_text() and not (tmp_path / "hours.png").exists()


def test_products_run_at_rates_that_were_measured() -> None:
    rates = {card.name: products_of(card) for card in CARDS}
    assert rates["A100-40GB"] == pytest.approx(PRODUCTS["A100-40GB"]) and rates["A100-80GB"] == PRODUCTS["A100-80GB"]
    assert rates["RTX3080-10GB"] == pytest.approx(PRODUCTS["RTX3080"])
    assert rates["RTX4070"] == pytest.approx((58 * OTHERWISE_GEFORCE[0], 29.1 * OTHERWISE_GEFORCE[1]))
    assert products_of(H100_PCIE)[0] == pytest.approx(756 * PRODUCTS["H100"][0] / 989)
    assert rates["A10"] == pytest.approx((125 * OTHERWISE[0], 31.2 * OTHERWISE[1]))


def test_convolutions_in_fp32_use_tensor_cores_where_there_are_tf32() -> None:
    work = ("convolution", "fp32", (2**16, 512, 512))
    a100, v100 = DatasheetSpeeds(find_card("A100-40GB")), DatasheetSpeeds(find_card("V100-16GB"))
    assert a100.seconds(*work) == pytest.approx(2 * a100.seconds("convolution", "bf16", work[2]), rel=0.01)
    assert v100.seconds(*work) > 5 * v100.seconds("convolution", "fp16", work[2])
