"""The table of users' cards: from files that are made up here, since the folder holds none until a card has run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import cards
from benchmarks.cards import Sample, applied, fitted, run
from simpletune.commands.doctor import bench_steps
from simpletune.commands.doctor.bench import RUNS
from simpletune.config.schema import TrainConfig
from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.system.gpus import GIB, card_named_by_driver
from simpletune.system.options import UserError

T4 = card_named_by_driver("Tesla T4", int(14.75 * GIB), (7, 5))
RTX3060 = card_named_by_driver("NVIDIA GeForce RTX 3060", int(11.6 * GIB), (8, 6))
LARGE = 8192
WORK = {
    "products": KernelWork("product_tn", "fp16", (LARGE, LARGE, LARGE)),
    "attention": KernelWork("attention", "fp16", (24, 4096, 4096, 64)),
    "traffic": KernelWork("add", "fp16", (2**30,)),
    "convolution": KernelWork("convolution", "fp16", (LARGE, 1280, 1280)),
}
STEPS = (
    {"products": 9, "attention": 1, "traffic": 3}, {"products": 1, "attention": 30, "traffic": 3},
    {"products": 1, "attention": 1, "traffic": 60}, {"products": 2, "convolution": 40, "traffic": 2},
)  # fmt: skip


def steps(card, core: float = 1e-4) -> list[Sample]:
    """Steps that the device bounds, each by another of its constants, and one that the host bounds."""
    found = []
    for counts in STEPS:
        work = Counter({WORK[name]: count for name, count in counts.items()})
        found.append(Sample(card, HostSpeeds(core=core), [StreamWork(COMPUTE, "forward", "", work=work)], 1.0))
    queueing = StreamWork(COMPUTE, "forward", "", host=Counter(operation=20_000, backward=5_000))
    return [*found, Sample(card, HostSpeeds(core=core), [queueing], 1.0)]


def made_up(name: str = "Tesla T4", **more: object) -> dict:
    run = {
        "predicted_mib": 2653.1, "measured_mib": 2700.0, "predicted_seconds": 1.5, "seconds": 3.0, "least": 2.9,
        "steps": 10, "host": {"core": 1.6e-4, "launch": 3e-6}, "host_after": {"core": 2e-4, "launch": 3e-6},
    }  # fmt: skip
    return {
        "version": 1, "card": name, "capability": [7, 5], "memory_bytes": int(14.75 * GIB), "driver": "580.65.06",
        "system": "Linux", "core": 1.5e-4, "date": "2026-11-27", "versions": {"torch": "2.13.0", "simpletune": "0.1.0"},
        "runs": [{"name": "LoRA int8, 512 px", **run}, {"name": "full bf16, 512 px", "left_out": "not supported"}],
        **more,
    }  # fmt: skip


def put(folder: Path, name: str, content: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def test_a_fit_finds_the_constants_that_the_steps_were_made_with() -> None:
    """Of a card with a measured rate of products, and of one that has none yet."""
    true = {
        ("PRODUCTS", "T4"): 0.6, ("PRODUCTS", "RTX3060-12GB"): 1.3, ("ATTENTION", "efficient"): 0.7,
        ("ATTENTION", "flash"): 1.2, ("CONVOLUTION", ""): 0.5, ("HOST", ""): 1.6, ("OF_BANDWIDTH", ""): 0.8,
    }  # fmt: skip
    samples = [*steps(T4), *steps(RTX3060, 2e-4)]
    with applied(true):
        measured = [Sample(each.card, each.host, each.sections, each.predicted()) for each in samples]
    assert fitted(measured) == {name: pytest.approx(scale, rel=0.02) for name, scale in true.items()}


def test_a_fit_to_what_is_predicted_already_and_to_nothing_keeps_todays_constants() -> None:
    assert fitted([]) == {}
    today = [Sample(each.card, each.host, each.sections, each.predicted()) for each in steps(T4)]
    assert set(fitted(today).values()) == {1.0}


def test_the_page_shows_predicted_and_measured_and_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def recorded(name: str, capability: tuple[int, int]) -> list[StreamWork]:
        asked.append((name, capability))
        return list(steps(T4)[0].sections)

    monkeypatch.setattr(cards, "recorded", recorded)
    folder = put(tmp_path / "cards", "t4-15gib.json", made_up())
    other = made_up(
        "NVIDIA Z9", driver=None, system="WSL", runs=[{"name": "a run of before", "seconds": 1.0, "steps": 3}]
    )
    put(folder, "z9-15gib-wsl.json", other)
    text = run(tmp_path, folder).read_text()
    assert "- Tesla T4, 14.8 GiB: 2026-11-27, Linux, driver 580.65.06, torch 2.13.0, simpletune 0.1.0\n" in text
    assert (
        "| t4-15gib: LoRA int8, 512 px | 2653.1 | 2700.0 | -0.017 | 1.500 | 3.000 | 2.900 | 2.000 | 1.250 |  |" in text
    )
    assert "| t4-15gib: full bf16, 512 px |  |  |  |  |  |  |  |  | not supported |" in text
    assert "- NVIDIA Z9, 14.8 GiB: 2026-11-27, WSL, driver unknown, torch" in text
    assert "| z9-15gib-wsl: a run of before |  |  |  |  | 1.000 |  |  |  |  |" in text
    assert "| PRODUCTS T4 | 0." in text and "| 42.3, 4.3 |" in text
    assert asked == [("LoRA int8, 512 px", (7, 5))], "a card without figures and a run of before are no part of a fit"


def test_every_broken_or_foreign_file_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = put(tmp_path / "cards", "t4-15gib.json", made_up())
    put(folder, "my-card.json", made_up())
    put(folder, "l4.json", made_up(owner="anna"))
    put(folder, "intel.json", made_up(capability=None, memory_bytes=None))
    (folder / "notes.txt").write_text("hello")
    (folder / ".gitkeep").touch()
    with pytest.raises(UserError) as error:
        run(tmp_path, folder)
    said = str(error.value)
    assert f"{folder}/my-card.json: one file a card, named after it. Rename it to t4-15gib.json" in said
    assert f"{folder}/l4.json: not a file of simpletune doctor --bench (owner: Extra inputs" in said
    assert f"{folder}/intel.json: measured on a processor, not on a card. Remove it" in said
    assert f"{folder}/notes.txt: not a file" in said and f"{folder}/t4-15gib.json" not in said
    assert not (tmp_path / cards.PAGE).exists()


def test_an_empty_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cards.EMPTY in run(tmp_path, tmp_path / "nothing").read_text()
    assert "holds no file yet" in capsys.readouterr().out


def test_the_work_of_a_run_is_recorded_for_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tiny model, as on a machine without a card."""
    honest = bench_steps.run_config

    def small(overrides: Sequence[str], capability: tuple[int, int] | None) -> TrainConfig:
        config = honest(overrides, None)
        return config.model_copy(update={"data": config.data.model_copy(update={"resolution": 64})})

    monkeypatch.setattr(bench_steps, "run_config", small)
    name = "LoRA int8, streamed, 512 px"
    assert name in RUNS
    kinds = {work.kind for section in cards.recorded.__wrapped__(name, (7, 5)) for work in section.work}
    assert {"to_device", "attention"} <= kinds
