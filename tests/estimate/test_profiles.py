"""Presets by card, checkpointing by budget, and what is said when memory is full."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import read_json, validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory import Memory
from simpletune.engine.memory.cuda_libraries import cublas_workspace
from simpletune.engine.memory.profiles import FULL, LORA
from simpletune.estimate import auto_settings, levers
from simpletune.estimate.auto_settings import RecomputeCounts, resolve_checkpointing, with_checkpointed
from simpletune.estimate.job_estimate import needed_bytes
from simpletune.estimate.levers import LEVERS, savings, with_effective_changes
from simpletune.estimate.simulate.simulate import simulate
from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.system.checksums import without_sum
from simpletune.system.console import verbose
from simpletune.system.gpus import Card
from simpletune.system.options import ConfigError, UserError
from simpletune.training.explain_errors import memory_by_kind
from simpletune.training.train import train

MIB = 2**20
SIZE = (256, 256)  # of the runs of config_of
SOME = (  # of LEVERS
    "memory.checkpointing=all", "precision.weights=int8", "precision.weights=nf4", "train.batch_size=1",
    "adapter.dtype=bf16",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "memory-levers.md").read_text()


@pytest.fixture(autouse=True)
def searches_share_what_they_predict(monkeypatch: pytest.MonkeyPatch, simulate_once) -> None:
    for module in ("levers", "auto_settings"):
        monkeypatch.setattr(f"simpletune.estimate.{module}.simulate", simulate_once)


@pytest.fixture
def config_of(tiny_config: dict, three_blocks: Path):
    """The tiny run on three blocks at 256 px with some values changed."""

    def make(**changes: object) -> TrainConfig:
        data = copy.deepcopy(tiny_config) | {"memory": {}} | changes
        data["model"]["pretrained"] = str(three_blocks)
        data["data"] |= {"resolution": 256, "max_upscale": None}
        return validate(data, "test")

    return make


@pytest.fixture
def of_two_blocks(config_of, tmp_path: Path) -> TrainConfig:
    """What more can be saved of: two blocks, whose activations are all kept, and a batch of two."""
    tiny_sd3.build(tmp_path / "two", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=1, dtype="fp32")
    config = config_of(memory={"checkpointing": "none"}, train={"steps": 4, "batch_size": 2})
    data = config.model_dump(mode="json", by_alias=True)
    data["data"]["resolution"] = 64
    return validate(data | {"model": {"pretrained": str(tmp_path / "two"), "t5_length": 8}}, "two blocks")


@pytest.mark.parametrize(("kind", "presets"), [("lora", LORA), ("full", FULL)])
def test_every_profile_is_valid_and_has_its_configuration_and_its_row_on_the_page(
    kind: str, presets: dict, tiny_config: dict
) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name, preset in presets.items():
        data = copy.deepcopy(tiny_config) | {"adapter": {"method": kind}, "memory": {"profile": name}}
        data["model"] = {"pretrained": "stabilityai/stable-diffusion-3-medium-diffusers"}  # 24 blocks
        config = validate({key: data[key] for key in data if key not in ("precision", "optimizer")}, name)
        options = preset.get("memory", {})
        assert config.memory.profile == name and config.precision.weights == preset["precision"]["weights"]
        assert {key: getattr(config.memory, key) for key in options} == options
        data = read_json(Path(f"sd3_medium_{kind}_{name}"))
        assert data["memory"] == {"profile": name} and (data["adapter"]["method"] == "full") == (kind == "full")
        own = [row for row in rows if row.startswith(f"| `{name}` |")][("lora", "full").index(kind)]
        levers = "modulation|vae_tile|checkpointing|keep_attention|feed_forward|resident_blocks"
        assert set(re.findall(rf"`({levers})=(\w+)`", own)) == {
            (key, str(value)) for key, value in options.items() if key != "optimizer_in_backward"
        }
        when = {True: "updates in the backward pass", False: "updates after the backward pass"}
        assert kind == "lora" or when["optimizer_in_backward" in options] in own


def test_the_page_names_every_lever() -> None:
    levers = PAGE[PAGE.index("## The levers") : PAGE.index("## Precisions")]
    parts = {"budget_gib", "modulation_window"}  # of checkpointing auto and of the plan
    assert [name for name in Memory.model_fields if name not in parts and f"| `memory.{name}" not in levers] == []


def test_values_of_ones_own_go_before_a_profiles(tiny_config: dict) -> None:
    own = {"precision": {"weights": "fp32"}, "memory": {"profile": "4gb", "modulation": "resident"}}
    config = validate(tiny_config | own, "own")
    assert (config.precision.weights, config.memory.modulation, config.memory.vae_tile) == ("fp32", "resident", 512)
    with pytest.raises(ConfigError, match="memory.profile"):
        validate(tiny_config | {"memory": {"profile": "5gb"}}, "unknown")


def test_what_a_profile_recomputes_gives_way_as_a_whole(tiny_config: dict) -> None:
    """A lever of one's own, or one that excludes a part of it; what remains of the profile still applies."""

    def memory(own: dict, **sections: dict) -> Memory:
        medium = {"pretrained": "stabilityai/stable-diffusion-3-medium-diffusers"}  # 24 blocks
        data = {key: tiny_config[key] for key in tiny_config if key not in ("precision", "optimizer")}
        return validate(data | {"model": medium, "memory": {"profile": "6gb", **own}, **sections}, "own").memory

    def recomputed(own: Memory) -> tuple:
        return own.checkpointing, own.keep_attention, own.feed_forward

    assert recomputed(memory({})) == (12, "all", "alone")
    for own, left in (
        ({"checkpointing": "none"}, ("none", "auto", "auto")),
        ({"resident_blocks": 0}, ("all", "auto", "auto")),
        ({"offload_checkpoint_inputs": True}, ("all", "auto", "auto")),
        ({"keep_attention": "all"}, ("all", "all", "auto")),
    ):
        found = memory(own)
        assert recomputed(found) == left and found.modulation == "plan", own
    for speed in ({"compile": True}, {"attention": "math"}):
        assert recomputed(memory({}, speed=speed)) == (12, "auto", "auto")


LADDER = [
    *(RecomputeCounts(count, count) for count in range(4)),
    *(RecomputeCounts(3, keeping) for keeping in (2, 1, 0)),
]
"""What auto chooses of three blocks, by increasing time."""


def recomputed(config: TrainConfig) -> RecomputeCounts:
    """What a configuration says."""
    return RecomputeCounts(config.memory.checkpointed_count(3), config.memory.keeping_count(3))


def test_auto_checkpoints_as_few_blocks_as_fit(config_of, simulate_once) -> None:
    auto = config_of(memory={"checkpointing": "auto"})
    peaks = [simulate_once(with_checkpointed(auto, *each), SIZE).peak.bytes for each in LADDER]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[-1]
    for budget in (peaks[0], peaks[0] - 1, peaks[1], peaks[2], peaks[-2], min(peaks)):
        of_budget = config_of(memory={"checkpointing": "auto", "budget_gib": budget / 2**30})
        chosen = resolve_checkpointing(of_budget, SIZE)
        assert recomputed(chosen) == next(each for each, peak in zip(LADDER, peaks, strict=True) if peak <= budget)
        assert chosen.memory.feed_forward == ("alone" if recomputed(chosen).checkpointed else "auto")


@pytest.mark.parametrize("given", [{"keep_attention": "none"}, {"keep_attention": "all", "feed_forward": "block"}])
def test_auto_leaves_what_is_set_as_it_is(given: dict, config_of, simulate_once) -> None:
    auto = config_of(memory={"checkpointing": "auto", "budget_gib": 9.0, **given})
    keeps = given["keep_attention"] == "all"
    budget = simulate_once(with_checkpointed(auto, 2, keeps * 2), SIZE).peak.bytes / 2**30
    memory = resolve_checkpointing(
        config_of(memory={**given, "checkpointing": "auto", "budget_gib": budget}), SIZE
    ).memory
    assert memory.keeping_count(3) == keeps * memory.checkpointed_count(3) and memory.checkpointed_count(3) == 2
    assert memory.feed_forward == given.get("feed_forward", "alone")
    with pytest.raises(UserError, match="memory.budget_gib: .* is too little"):
        resolve_checkpointing(config_of(memory={**given, "checkpointing": "auto", "budget_gib": 0.001}), SIZE)


def test_auto_needs_one_card_or_budget(config_of) -> None:
    with pytest.raises(ConfigError, match="memory.budget_gib: 9.0 with memory.checkpointing all.*checkpointing=auto"):
        config_of(memory={"checkpointing": "all", "budget_gib": 9.0})
    with pytest.raises(UserError, match="memory.checkpointing: auto .* no card here"):
        resolve_checkpointing(config_of(memory={"checkpointing": "auto"}), SIZE)
    unchanged = config_of()
    assert resolve_checkpointing(unchanged, SIZE) is unchanged


def a_card(peak: int) -> Card:
    """One with room for a training step of that peak, in bytes, and no more."""
    room = needed_bytes(peak + cublas_workspace((8, 9))) + 16  # bytes, for what rounding takes
    return Card("Test 1", room / 2**30, (8, 9), found=1.0)


@pytest.fixture
def auto(config_of, tiny_config: dict, tmp_path: Path) -> TrainConfig:
    """Auto without a budget, and a cache of its own."""
    output = tiny_config["output"] | {"cache": str(tmp_path / "cache")}
    return config_of(memory={"checkpointing": "auto"}, output=output)


def test_auto_without_a_budget_takes_the_card_and_asks_once(
    auto: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, simulate_once
) -> None:
    peaks = [simulate_once(with_checkpointed(auto, count, count), SIZE).peak.bytes for count in range(3)]
    for count in (0, 1, 2):
        with verbose():
            chosen = resolve_checkpointing(auto, SIZE, a_card(peaks[count]))
        assert recomputed(chosen) == (count, count)
    peak = f"{peaks[2] / MIB:,.0f}"
    told = f"auto: 2 of 3 blocks, 2 keeping attention's output, predicted peak {peak} of {peak} MiB"
    assert told in capsys.readouterr().out
    monkeypatch.setattr(auto_settings, "simulate", None)  # a second start has kept what it needs
    assert resolve_checkpointing(auto, SIZE, a_card(peaks[2])).memory.checkpointing == 2
    assert resolve_checkpointing(auto, SIZE, a_card(peaks[1]), before=RecomputeCounts(2, 2)).memory.checkpointing == 2
    assert resolve_checkpointing(auto, SIZE, a_card(peaks[2]), before=RecomputeCounts(1, 1)).memory.checkpointing == 2
    with pytest.raises(UserError, match="no card here"):
        resolve_checkpointing(auto, SIZE)


def test_auto_leaves_out_what_other_programs_hold_and_refuses_the_cpu(
    auto: TrainConfig, monkeypatch: pytest.MonkeyPatch, simulate_once
) -> None:
    peak = simulate_once(with_checkpointed(auto, 0), SIZE).peak.bytes
    monkeypatch.setattr(auto_settings, "card_at_hand", lambda device: (a_card(peak), 0))
    assert resolve_checkpointing(auto, SIZE, torch.device("cuda")).memory.checkpointing == "none"
    monkeypatch.setattr(auto_settings, "card_at_hand", lambda device: (a_card(peak), MIB))
    assert resolve_checkpointing(auto, SIZE, torch.device("cuda")).memory.checkpointing == 1
    monkeypatch.setattr(auto_settings, "card_at_hand", lambda device: (a_card(1000), 0))
    assert resolve_checkpointing(auto, SIZE, torch.device("cuda")).memory.checkpointing == 3  # the forecast refuses it
    with pytest.raises(UserError, match="memory.checkpointing: auto .* is on the CPU. .*memory.budget_gib too"):
        train(auto)


def test_a_resumed_run_keeps_what_auto_has_chosen(
    tiny_config: dict, three_blocks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tiny_config["model"]["pretrained"] = str(three_blocks)
    peaks = {RecomputeCounts(count, count): (4 - count) * 2**30 for count in range(4)}
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(auto_settings, "recompute_peak", lambda _, size, which: (asked.append(size), peaks[which])[1])

    def of(budget: float, steps: int) -> TrainConfig:
        return validate(
            tiny_config | {"memory": {"checkpointing": "auto", "budget_gib": budget}, "train": {"steps": steps}}, "test"
        )

    chosen = {"threads": 1, "checkpointed": 2, "blocks": 3, "keeping_attention": 2, "modulation": "resident"}
    folder = train(of(2.0, 1))
    assert set(asked) == {(32, 32)}
    assert json.loads((folder / "config.json").read_text())["memory"]["checkpointing"] == "auto"
    assert without_sum(json.loads((folder / "chosen.json").read_text())) == chosen
    with verbose():
        train(of(9.0, 2), resume="latest")
    assert "checkpointing auto: 2 of 3 blocks, 2 keeping attention's output, as before" in capsys.readouterr().out
    assert without_sum(json.loads((folder / "chosen.json").read_text())) == chosen


@pytest.mark.slow
def test_every_lever_that_applies_is_valid_and_savings_are_in_order(of_two_blocks: TrainConfig) -> None:
    config = of_two_blocks
    found = savings(config)
    assert [saved for _, saved in found] == sorted((saved for _, saved in found), reverse=True)
    names = {" ".join(lever.overrides) for lever, _ in found}
    assert {"memory.checkpointing=all", "precision.weights=int8", "train.batch_size=1"} <= names
    least, saved = found[-1]
    smaller = with_effective_changes(config, least.overrides)
    assert simulate(config).peak.bytes - simulate(smaller).peak.bytes == saved  # by a simulation of its own
    assert with_effective_changes(config, ["memory.checkpointing=none"]) is None  # changes nothing
    assert with_effective_changes(config, ["memory.resident_blocks=0"]) is None  # not without checkpointing
    assert len(LEVERS) > len(found)


def test_a_full_device_names_what_was_resident_and_what_would_save_most(
    of_two_blocks: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = TrainStep.step

    def full(self: TrainStep, batches: list, gate: object = None) -> tuple:
        if type(batches[0].z_0) is not torch.Tensor:
            return step(self, batches)  # on fake tensors: what would have fitted
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(TrainStep, "step", full)
    monkeypatch.setattr(levers, "LEVERS", [lever for lever in LEVERS if lever.overrides[0] in SOME])
    asked: list[tuple[TrainConfig, list]] = []
    monkeypatch.setattr(levers, "savings", lambda config: (asked.append((config, savings(config))), asked[-1][1])[1])
    with pytest.raises(UserError) as caught:
        train(of_two_blocks)
    text = str(caught.value)
    assert caught.value.code == 5
    assert "Tried to allocate 2.00 GiB." in text and "More." not in text
    assert "frozen weights" in text
    ((config, saved),) = asked
    named = [f"{' '.join(lever.overrides)} " in text for lever, _ in saved]
    assert config.memory.checkpointing == "none" and config.train == of_two_blocks.train
    assert named == [True, True, True, False] and "adapter.dtype" not in text, "the least, and what saves nothing"


def test_resident_counts_each_kind(config_of) -> None:
    from simpletune.stages.load import load_base

    cpu = torch.device("cpu")
    config = config_of(adapter={"method": "lora", "rank": 2})
    transformer = load_base(config, cpu, [(256, 256)])
    frozen = sum(t.nbytes for t in (*transformer.parameters(), *transformer.buffers()))
    core = assemble(config, transformer, SingleProcess(cpu))
    core.step(SyntheticBatches(config, core).step(0))
    kinds = memory_by_kind(transformer, core.optimizer, cpu)
    trained = sum(parameter.nbytes for parameter in core.parameters)
    assert kinds["frozen weights"] == frozen and kinds["trained weights"] == trained and kinds["gradients"] == 0
    assert 2 * trained <= kinds["optimizer state"] <= 2 * trained + 8 * len(core.parameters)
