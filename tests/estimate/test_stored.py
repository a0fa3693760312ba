"""Predictions that ship: what they are found by, when they answer, and that they are what computing gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from benchmarks import stored_predictions
from benchmarks.stored_predictions import Row, compute, grid, read, sample, settled, update
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.estimate import stored
from simpletune.estimate.job_estimate import attention_of, estimate, shipped_job
from simpletune.estimate.simulate import simulate_stages
from simpletune.estimate.simulate.reports import L4, JobReport, square_size
from simpletune.system.package import PACKAGE

READ_WITHOUT_EFFECT = {"train.seed", "optimizer.lr"}  # of HARMLESS: numbers that a simulation reads


@pytest.fixture
def demo_row() -> Row:
    """The row of the configuration demo, if the file answers here."""
    if not stored.is_current(stored.FILE) or stored.other_versions():
        pytest.skip("the stored predictions are for other sources or libraries: make predictions")
    return next(row for row in grid() if row.file == "demo")


@pytest.fixture(autouse=True)
def looked_at_anew() -> Iterator[None]:
    """What a test puts in place of file, sources or libraries is looked at, and forgotten after it."""
    yield
    for each in (stored.read_about, stored.is_current):
        each.cache_clear()


def changed(config: TrainConfig, path: str, value: object) -> TrainConfig:
    section, _, name = path.rpartition(".")
    if section:
        name, value = section, getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={name: value})


def key_of(config: TrainConfig) -> str:
    return stored.prediction_key(config, attention_of(config, L4))


def test_what_a_key_leaves_out_changes_no_prediction(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, rate, seed and prompts differ; and the simulation reads no other field that the key leaves out."""
    config = validate(tiny_config | {"validation": {"prompts": ["a"], "steps": 4, "loss_samples": 2}}, "test")
    other, seen = config, set[str]()
    others = {"train.steps": 7, "train.seed": 5, "optimizer.lr": 3e-3, "validation.prompts": ["another"], "name": "x"}
    for path, value in {**others, "data.path": "elsewhere", "checkpoint.every": 3, "device": "cuda"}.items():
        other = changed(other, path, value)
    assert key_of(other) == key_of(config)
    sections = {id(getattr(other, name)): f"{name}." for name in TrainConfig.model_fields} | {id(other): ""}
    original = BaseModel.__getattribute__

    def watched(self: BaseModel, name: str) -> object:
        if (section := sections.get(id(self))) is not None:
            seen.add(section + name)
        return original(self, name)

    def computed(config: TrainConfig) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(stored_predictions, "settled", lambda file, overrides: config)
            patch.setattr(BaseModel, "__getattribute__", watched)
            return compute(Row("", "", ()))[1]

    assert computed(other) == computed(config)
    assert {"data.resolution", "adapter.rank", "train.seed"} <= seen
    assert seen & set(stored.HARMLESS) <= READ_WITHOUT_EFFECT


def test_other_shapes_have_another_key() -> None:
    config = settled("demo", ())
    changes = {
        "adapter.rank": 3, "train.batch_size": 3, "data.resolution": 128, "memory.checkpointing": "all",
        "optimizer.weight_decay": 0.5, "validation.prompts": [], "model.t5": False, "speed.deterministic": True,
    }  # fmt: skip
    keys = {key_of(config), *(key_of(changed(config, path, value)) for path, value in changes.items())}
    keys |= {stored.prediction_key(config, "math"), stored.prediction_key(config, "efficient", 2)}
    assert len(keys) == len(changes) + 3
    assert key_of(changed(config, "model.loras", ["a"])) in keys, "LoRAs in the base change values only"


def test_the_key_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model ships within the package, wherever that is."""
    config = settled("demo", ())
    folder = Path(config.model.pretrained)
    before = key_of(config)
    monkeypatch.setattr(stored, "ASSETS", Path("/elsewhere"))
    assert key_of(changed(config, "model.pretrained", f"/elsewhere/{folder.name}")) == before


def test_an_estimate_that_ships_simulates_nothing(
    demo_row: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = changed(settled("demo", ()), "output.cache", str(tmp_path))
    monkeypatch.setattr(simulate_stages, "simulate_parts", None)
    found = estimate(config, L4)
    assert found.job.train.trained_bytes > 0 and not list(tmp_path.iterdir())
    with pytest.raises(TypeError):
        estimate(changed(config, "adapter.rank", 3), L4)
    with pytest.raises(TypeError):
        estimate(config, L4, (64, 96))  # not a square


def test_it_is_shown_at_once_for_which_versions_it_is_then_the_own_follows(
    demo_row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = shipped_job(settled("demo", ()), L4, square_size(settled("demo", ())))
    assert own is not None
    made = stored.versions()["torch"]
    monkeypatch.setattr(stored, "versions", lambda: {"torch": "9.9"})
    asked: list[TrainConfig] = []
    monkeypatch.setattr(simulate_stages, "simulate_parts", lambda config, *_: asked.append(config) or own)
    main(["estimate", "demo", "--device", "L4", f"output.cache={tmp_path}"])
    first, own_words = capsys.readouterr().out.split("predict demo with the installed versions instead\n")
    assert f"demo, as stored for torch {made}: predicted peak memory" in first and "it fits" in first
    assert "demo: predicted peak memory" in own_words and len(asked) == 1


def test_what_is_known_is_shown_before_a_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(simulate_stages, "simulate_parts", None)
    with pytest.raises(TypeError):
        main(["estimate", "demo", "adapter.rank=3", f"output.cache={tmp_path}"])
    assert "GiB of weights" in (said := capsys.readouterr().out) and "trained values; a step on fake tensors" in said


def test_comments_and_docstrings_do_not_change_the_sources_but_code_does(tmp_path: Path) -> None:
    place = next(place for place in reversed(stored.SOURCES) if place.endswith(".py"))
    (tmp_path / place).parent.mkdir(parents=True)
    file = Path(shutil.copy(PACKAGE / place, tmp_path / place))
    before = [stored.hash_sources(parsed, tmp_path) for parsed in (True, False)]
    file.write_text(file.read_text().replace('"""', '"""Other words. ', 1) + "\n# a comment\n")
    words = [stored.hash_sources(parsed, tmp_path) for parsed in (True, False)]
    assert words[0] == before[0] and words[1] != before[1]
    file.write_text(file.read_text() + "\nOTHER = 1\n")
    assert stored.hash_sources(True, tmp_path) != before[0]


def test_predictions_of_other_sources_do_not_answer(demo_row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settled("demo", ())
    assert isinstance(shipped_job(config, L4, square_size(config)), JobReport)
    monkeypatch.setattr(stored, "hash_sources", lambda parsed=True: "other")
    stored.is_current.cache_clear()
    assert shipped_job(config, L4, square_size(config)) is None


def test_rows_of_other_sources_are_kept_if_a_sample_of_them_comes_out_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, file, asked = [Row(f"key{n}", f"file{n}", ()) for n in range(20)], tmp_path / "rows.zip", list[Row]()
    result = "first"

    def simulate(some: list[Row]) -> list[tuple[Row, str]]:
        asked.extend(some)
        return [(row, f"{result} {row.key}") for row in some]

    def again(sources: str) -> list[Row]:
        asked.clear()
        stored.read_about.cache_clear()
        monkeypatch.setattr(stored, "hash_sources", lambda parsed=True: f"{sources} {parsed}")
        update(file, rows, simulate)
        stored.read_about.cache_clear()
        assert read(file) == {row.key: f"{result} {row.key}" for row in rows}
        assert stored.read_about(file)["sources"] == f"{sources} True"
        return list(asked)

    assert again("old") == rows
    assert again("old") == []
    assert again("new") == sample(rows, "new True") and len(asked) == 5
    assert again("newer") != sample(rows, "new True")
    rows.append(Row("another", "file", ()))
    assert again("newer") == rows[-1:]
    rows.pop()
    result = "second"
    assert again("newest")[5:] == rows  # the sample changed
    monkeypatch.setattr(stored, "versions", lambda: {"torch": "9.9"})
    assert again("newest") == rows


@pytest.mark.slow
def test_the_stored_predictions_are_of_todays_sources_and_some_are_computed_equal() -> None:
    assert stored.is_current(stored.FILE), "run make predictions"
    if stored.other_versions():
        pytest.skip(f"they are for {json.dumps(stored.read_about(stored.FILE)['versions'])}")
    rows, known = list(grid()), read(stored.FILE)
    assert known.keys() == {row.key for row in rows}
    demo = next(row for row in rows if row.file == "demo")
    for row in (demo, *sample(rows, stored.hash_sources()[::-1])):  # others than `make predictions` draws
        assert compute(row) == (row, known[row.key])
