"""Estimates: what a run needs of a card, the host and the disk; kept, shown, compared; what train does with them."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_sdxl
import torch
from tiny_runs import TrainOnce

from simpletune.apps.cli.main import main, parser
from simpletune.config.load import validate
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.estimate import disk_needs as disk_counting
from simpletune.estimate import job_estimate as estimating
from simpletune.estimate import run_estimate as forecasting
from simpletune.estimate.disk_needs import DataCounts, bytes_of_prompt, checkpoint_bytes, disk_needs
from simpletune.estimate.job_estimate import CONTEXT, MIB, Estimate, estimate, largest_peak, needed_bytes, needs_of
from simpletune.estimate.run_estimate import cheapest_change, compare_with_measured, estimate_run, print_comparison
from simpletune.estimate.simulate import simulate_stages
from simpletune.estimate.simulate.reports import JobReport, with_workspaces
from simpletune.estimate.simulate.simulate_stages import simulate_parts
from simpletune.estimate.terminal import bars
from simpletune.system import host_memory
from simpletune.system.gpus import CARDS, GIB, Card, card_named_by_driver, find_card, peak_tflops
from simpletune.system.options import UserError
from simpletune.system.stage_timer import Stage, StageTimer
from simpletune.training.train import train

L4 = find_card("L4")
CUDA = torch.device("cuda")
SIZE = (64, 64)


def test_a_card_is_found_by_its_name_or_memory() -> None:
    assert [find_card(text) for text in ("L4", "l4", "nvidia l4", "NVIDIA-L4")] == [L4] * 4
    for text, gib in (("12GiB", 12), ("12 gb", 12), ("7.5G", 7.5)):
        card = find_card(text)
        assert card.gib == gib and 0.95 * gib * GIB < card.bytes < gib * GIB
    for text in ("", "L5", "RTX30", "0GiB", "4000GiB", "-3GiB", "L4;rm"):
        with pytest.raises(UserError, match="--device"):
            find_card(text)


def test_what_torch_finds_on_cards_is_what_users_were_told() -> None:
    # From users' error messages: "14.75 GiB total capacity" (T4), 22.03 (L4), 11.75 (RTX 3060), 23.68 (RTX 4090).
    told = {"T4": 14.75, "L4": 22.03, "RTX3060-12GB": 11.75, "RTX3060-6GB": 5.80, "RTX4090": 23.68}
    for name, gib in told.items():
        assert 0.975 * gib < find_card(name).bytes / GIB <= gib, name
    assert len({card.name for card in CARDS}) == len(CARDS)


def test_the_card_at_hand_takes_its_speed_from_the_table_and_its_memory_from_the_driver() -> None:
    card = card_named_by_driver("NVIDIA A100-SXM4-80GB", 79 * GIB, (8, 0))
    assert (card.bytes, card.tflops, card.bandwidth) == (79 * GIB, 312, 2039)
    card = card_named_by_driver("NVIDIA GeForce RTX 4090", 24 * GIB - 7, (8, 9))
    assert (card.bytes, card.tflops) == (24 * GIB - 7, find_card("RTX4090").tflops)
    card = card_named_by_driver("NVIDIA GB10", 120 * GIB, (12, 1))
    assert card.bytes == 120 * GIB and card.tflops is None  # not in the table: nothing is guessed


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA GB10"])
def test_under_wsl_a_tenth_of_the_card_stays_with_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.15.1-microsoft-standard-WSL2")
    assert card_named_by_driver(name, 20 * GIB, (8, 9)).bytes == 18 * GIB


def test_a_device_by_its_name() -> None:
    known = {
        "NVIDIA L4": 121, "Tesla T4": 65, "NVIDIA A10G": 70, "NVIDIA A10": 125, "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H200": 989, "NVIDIA GeForce RTX 3060": 25, "NVIDIA GeForce RTX 3060 Ti": 32.4,
        "NVIDIA GeForce RTX 4090 Laptop GPU": 66, "NVIDIA GeForce RTX 4060 Ti": 44, "NVIDIA H100 PCIe": 756,
        "NVIDIA L40S": 362, "NVIDIA GeForce RTX 5070 Ti": 88, "AMD EPYC": None, "NVIDIA RTX 4000 Ada": 106.9,
    }  # fmt: skip
    assert {device: peak_tflops(device) for device in known} == known


def an_estimate(**stages: int) -> Estimate:
    parts = {name: MemorySnapshot(size, {"weights": size}, "backward", "blocks.1") for name, size in stages.items()}
    return Estimate(JobReport(parts, None, {}), (64, 64))  # type: ignore[arg-type]


def test_a_run_fits_to_the_byte_with_an_allowance_or_a_share() -> None:
    peak = 1000 * MIB
    must_have = peak + 256 * MIB + CONTEXT
    found = an_estimate(train=peak, validate=peak - 1)
    assert found.needed_bytes() == must_have and found.peak_stage == "train"
    assert found.fits(Card("a", must_have / GIB, (8, 9), found=1.0))
    assert not found.fits(Card("a", (must_have - 1) / GIB, (8, 9), found=1.0))
    assert not found.fits(Card("a", must_have / GIB, (8, 9), found=1.0), reserved=1)
    assert (
        needed_bytes(2336 * MIB) - CONTEXT == (2336 + 256) * MIB
    )  # torch's allocator reserved 2,530 on a simulated L4
    assert needed_bytes(8000 * MIB) - CONTEXT == 8400 * MIB
    for free in (700, 3000, 20000):
        card = Card("a", free / 1024, (8, 9), found=1.0)
        assert card.bytes - 2 <= needed_bytes(largest_peak(card)) <= card.bytes


def test_bars_are_as_long_as_their_bytes_and_show_every_kind() -> None:
    whole = MemorySnapshot(400 * MIB, {"weights": 100 * MIB, "activations": 300 * MIB}, "forward", "")
    half = MemorySnapshot(200 * MIB, {"weights": 200 * MIB}, "encode", "")
    first, second, legend = bars({"train": whole, "latents": half})
    assert first.count("█") == 10 and first.count("░") == 30 and second.count("█") == 20
    assert "weights" in legend and "activations" in legend and "gradients" not in legend


def test_an_estimate_is_the_simulation_and_is_kept(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config["output"]["cache"] = str(tmp_path)  # without what others have kept
    config = validate(tiny_config, "test")
    found = estimate(config, L4.capability)
    parts = simulate_parts(config, capability=L4.capability)
    assert found.stages == with_workspaces(parts, L4.capability).stages
    monkeypatch.setattr(simulate_stages, "simulate_parts", None)  # a second simulation would fail
    assert estimate(config.model_copy(update={"name": "other"}), L4.capability) == found
    hopper = estimate(config, (9, 0))  # the same simulation with other workspaces
    assert hopper.stages == with_workspaces(parts, (9, 0)).stages
    for name in ("text", "train"):
        assert hopper.stages[name].bytes > found.stages[name].bytes
    bf16 = {"precision": config.precision.model_copy(update={"compute": "bf16"})}
    with pytest.raises(TypeError):
        estimate(config.model_copy(update=bf16), (9, 0))  # another attention
    with pytest.raises(TypeError):
        estimate(config.model_copy(update={"train": config.train.model_copy(update={"batch_size": 3})}), L4.capability)


def test_a_kept_prediction_is_for_one_version_of_the_code_and_one_kernel_of_attention(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cards with the same kernel only the workspaces differ, which are added to what is kept."""
    tiny_config["precision"]["compute"] = "bf16"
    config = validate(tiny_config, "test")
    volta, ampere, ada, hopper = (
        estimating.cache_file(config, capability, SIZE) for capability in ((7, 0), (8, 0), (8, 9), (9, 0))
    )
    assert ampere == ada == hopper != volta
    names = {ada}
    changes = {"VERSION": estimating.VERSION + 1, "__version__": "0.0.0", "version_or_none": lambda name: "0.0.0"}
    for name, value in changes.items():
        monkeypatch.setattr(estimating, name, value)
        names.add(estimating.cache_file(config, L4.capability, SIZE))
    assert len(names) == 4


def test_a_prompt_is_counted_with_what_is_pooled(tiny_config: dict, tmp_path: Path) -> None:
    """Within SDXL's 77 tokens no encoder leaves room for it."""
    small = {"data": tiny_config["data"] | {"resolution": 64}}
    data = tiny_config | small | {"model": {"family": "sdxl", "pretrained": str(tiny_sdxl.build(tmp_path / "sdxl"))}}
    model = (config := validate(data, "test")).model
    embeds, pooled = model.text.tokens * model.text.width, model.text.pooled_width
    assert bytes_of_prompt(config) == 4 * (embeds + pooled) and embeds and pooled  # fp32 encoders on the CPU


def test_needs_follow_the_run(tiny_config: dict) -> None:
    config = validate(tiny_config, "test")
    needs = estimate(config, L4.capability)
    assert needs.counts and needs.counts.images > 0 and needs.download == {}
    assert needs.disk["cached pictures"] > 0 and needs.disk["cached prompts"] > 0
    output = {**tiny_config["output"], "cache": "s3://bucket/cache"}
    remote = needs_of(validate(tiny_config | {"output": output}, "test"), needs.job, needs.size)
    cached = needs.disk["cached pictures"] + needs.disk["cached prompts"]
    assert remote.disk["local part of the cache"] == cached and remote.host == needs.host
    tiny_config["checkpoint"] = {"every": 1, "keep_last": 5}
    more = estimate(validate(tiny_config, "test"), L4.capability)
    assert more.disk["checkpoints"] == 4 * needs.disk["checkpoints"]  # 4 steps
    averaged = estimate(validate(tiny_config | {"ema": {}}, "test"), L4.capability)
    assert averaged.disk["checkpoints"] > more.disk["checkpoints"]
    assert sum(averaged.host.values()) - sum(more.host.values()) == needs.job.train.trained_bytes > 0


HUB_FILES = {  # bytes of the full-precision safetensors that the hub lists
    "sdxl": {
        "unet": 10_270_077_736, "text_encoder": 492_265_168, "text_encoder_2": 2_778_702_264, "vae": 334_643_268,
    },
    "sd15": {"unet": 3_438_167_540, "text_encoder": 492_265_874, "vae": 334_643_276},
}  # fmt: skip


def test_a_download_is_as_large_as_the_hubs_files(tiny_config: dict) -> None:
    parts = {"text_encoder": 123_060_480, "text_encoder_2": 694_659_840, "vae": 83_653_863}  # parameters
    tiny = simulate_parts(validate(tiny_config, "test"), SIZE, L4.capability)
    job = replace(tiny, part_bytes={part: 2 * count for part, count in parts.items()})
    for family, files in HUB_FILES.items():
        data = {"name": "run", "model": {"family": family}, "data": {"path": "demo:pictures"}}
        found = needs_of(validate(data, "test"), job, SIZE)
        assert found.download == pytest.approx(files, rel=1e-3)  # headers


@pytest.mark.parametrize(
    ("checkpoint", "train", "count"),
    [
        ({"every": None}, {"steps": 4}, 1),  # at the end
        ({"every": 1, "keep_last": 5}, {"steps": 4}, 4),
        ({"every": 1, "keep_last": 2}, {"steps": 4}, 3),  # the new one is whole before the oldest goes
        ({"every": 1, "keep_last": 5}, {"epochs": 1}, 6),  # how many steps that is, only the data says
    ],
)
def test_disk_needs_without_a_plan_count_checkpoints(
    checkpoint: dict, train: dict, count: int, tiny_config: dict
) -> None:
    config = validate(tiny_config | {"checkpoint": checkpoint, "train": train}, "test")
    counts = DataCounts(3, 3, 3 * config.data.resolution**2, 3)
    sizes = {what: size for what, _, size in disk_needs(config, counts=counts)}
    assert sizes["checkpoints"] == count * checkpoint_bytes(config)[0]
    assert sizes["cached pictures"] == 3 * 4 * 16 * (config.data.resolution // 8) ** 2


@pytest.mark.parametrize(("traces", "free", "said"), [(3, 10**6, True), (3, 10**12, False), (0, 10**6, False)])
def test_little_space_for_traces_is_said_if_there_will_be_any(
    traces: int, free: int, said: bool, tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    config = validate(tiny_config | {"profile": {"max_traces": traces}}, "test")
    monkeypatch.setattr(disk_counting, "free_disk_bytes", lambda _: free)
    monkeypatch.setattr(disk_counting, "disk_needs", lambda *_: iter(()))
    disk_counting.require_room(config, None)  # type: ignore[arg-type]  # of which no needs are read here
    assert ("free for profiler traces: writing may fail. profile.max_traces=0" in capsys.readouterr().out) is said


def told_of(words: list[str], capsys: pytest.CaptureFixture) -> dict:
    """What a verb prints with ``--json``: standard output holds that and nothing else."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr()
    assert "dropped rank" in told.err or "adapter.method" not in " ".join(words)
    return json.loads(told.out)


def test_estimate_prints_figures_and_bars_without_data(
    tiny_config: dict, write_config, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tiny_config["data"]["path"] = str(tmp_path / "nowhere")
    words = ["estimate", str(write_config(tiny_config)), "--device"]
    assert main([*words, "L4"]) == 0
    text = capsys.readouterr().out
    assert "it fits" in text and "█" in text and "data set was not read" in text
    told = told_of([*words, "L4"], capsys)
    assert set(told["stages"]) >= {"text", "latents", "train"} and told["fits"] is True
    for stage in told["stages"].values():
        assert stage["peak_allocated_mib"] == pytest.approx(sum(stage["by_kind"].values()), abs=0.5)
    assert told["peak_allocated_mib"] == max(stage["peak_allocated_mib"] for stage in told["stages"].values())
    assert told["needed_mib"] + told["left_mib"] == pytest.approx(told["device_mib"], abs=0.5)
    assert main([*words, "400MB"]) == 2
    assert "--device" in capsys.readouterr().err
    assert main([*words, "L4", "--reserve", "21.8"]) == 0
    assert "it does not fit" in capsys.readouterr().out


def test_estimate_takes_the_plan_by_default(tiny_config: dict, write_config, capsys: pytest.CaptureFixture) -> None:
    words = ["estimate", str(write_config(tiny_config)), "--device", "L4"]
    peaks = {
        kind: told_of([*words, f"memory.modulation={kind}"], capsys)["stages"]["train"]["peak_allocated_mib"]
        for kind in ("auto", "plan", "resident")
    }
    assert told_of(words, capsys)["stages"]["train"]["peak_allocated_mib"] == peaks["auto"] == peaks["plan"]
    assert peaks["plan"] < peaks["resident"]
    assert main(words) == 0
    assert "modulation plan (auto: " in capsys.readouterr().out


def test_every_verb_with_json_prints_nothing_else(
    tiny_config: dict, write_config, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletune.estimate.plan_command.RESOLUTIONS", (32,))
    file, drops = str(write_config(tiny_config)), ["adapter.method=full", "optimizer.name=adamw8bit"]
    assert told_of(["estimate", file, *drops], capsys)["stages"]
    assert told_of(["estimate", "--compare", file, *drops], capsys)["tiny"]
    small = [*drops, "train.batch_size=1"]
    assert len(told_of(["plan", file, *small, "--batches", "--device", "L4"], capsys)["L4"]) == 1
    assert told_of(["data", file, *drops], capsys)["usable"]
    assert told_of(["plan", file, *small, "--device", "L4"], capsys)["plans"][0]["costs"]
    with_json = {name for name, verb in parser().verbs().choices.items() if "--json" in verb.format_help()}
    assert with_json == {"estimate", "plan", "data", "doctor"}  # the last reads no configuration


def test_an_unknown_card_is_refused_before_torch_is_loaded() -> None:
    code = """if True:
        import sys
        from simpletune.apps.cli.main import main
        for verb in (["estimate"], ["plan"], ["plan", "--batches"]):
            assert main([*verb, "configs/demo.json", "--device", "RTX9999"]) == 2
        assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = done.stderr.split("Did you mean RTX")
    assert len(told) == 4 and all("RTX3090" in each.partition("?")[0] for each in told[1:])


def test_estimates_are_compared_in_a_table_and_a_picture(
    tiny_config: dict, write_config, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = []
    for name, batch in (("one", 1), ("four", 4)):
        config = tiny_config | {"name": name, "train": {"steps": 2, "batch_size": batch}}
        files.append(str(write_config(config, f"{name}.json")))
    for ending, begins in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        image = tmp_path / f"bars{ending}"
        assert main(["estimate", "--compare", *files, "--device", "L4", "--picture", str(image)]) == 0
        assert image.read_bytes().startswith(begins)
    drawn = (tmp_path / "bars.svg").read_text()
    assert all(f">{word}</text>" in drawn for word in ("one", "four", "weights", "activations")) and "@" not in drawn
    assert "L4: 22.0 GiB" in drawn and len(re.findall(r">0\.\d\d</text>", drawn)) == 2  # the sums
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("one ") and lines[2].startswith("four ") and "+0.0%" in lines[1]
    assert main(["estimate", "--compare", *files, "--picture", str(tmp_path / "bars.gif")]) == 2
    assert main(["estimate", "--compare", files[0], files[0], files[0]]) == 2


def test_a_card_without_bf16_is_said(tiny_config: dict, write_config, capsys: pytest.CaptureFixture) -> None:
    def said(*words: str) -> str:
        assert main(["estimate", str(write_config(tiny_config)), *words]) == 0
        return capsys.readouterr().out

    assert "T4 has no bf16" in said("precision.weights=bf16", "precision.compute=bf16", "--device", "T4")
    told = said("precision.weights=int8", "--device", "T4")
    assert "compute fp16 (auto: sm_75 has no bf16)" in told and "T4 has no bf16" not in told and "CUDA 12.6" not in told
    told = said("precision.weights=int8", "--device", "V100-16GB")
    assert "sm_70" in told and "CUDA 12.6 build" in told


def test_a_run_that_cannot_fit_is_refused_with_what_would(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def at_hand(mib: float, used: int = 0) -> Card:
        card = Card("Test 1", mib / 1024, (8, 9), found=1.0)
        monkeypatch.setattr(forecasting, "card_at_hand", lambda device: (card, used))
        return card

    some = ("adapter.dtype=bf16", "train.batch_size=1")
    monkeypatch.setattr(forecasting, "LEVERS", [each for each in forecasting.LEVERS if each.overrides[0] in some])
    config = validate(tiny_config | {"train": {"steps": 2, "batch_size": 8}}, "test")
    whole = estimate(config, L4.capability, SIZE).needed_bytes() / MIB
    card = at_hand(whole - 1)
    with pytest.raises(UserError, match="the cheapest change that fits: ") as refused:
        estimate_run(config, CUDA, SIZE)
    assert f"needs {whole:,.0f} MiB (predicted) and Test 1 has {whole - 1:,.0f}" in str(refused.value)
    change = cheapest_change(config, card, 0, SIZE)
    assert change is not None and change[2] <= (whole - 1) * MIB and " ".join(change[0]) in str(refused.value)
    assert estimate_run(config, CUDA, SIZE, force=True).needed_bytes() / MIB == whole
    assert "(--force)" in capsys.readouterr().out
    at_hand(whole)
    estimate_run(config, CUDA, SIZE)
    at_hand(whole, MIB)
    with pytest.raises(UserError, match="1 of them in use by other programs"):
        estimate_run(config, CUDA, SIZE)
    at_hand(510)
    monkeypatch.setattr(forecasting.Search, "fits", lambda self, config: False)
    with pytest.raises(UserError, match="no single change fits"):
        estimate_run(config, CUDA, SIZE)


def test_a_run_that_needs_more_main_memory_than_there_is_is_refused_with_what_takes_less(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(forecasting, "card_at_hand", lambda device: (Card("Test 1", 24, (8, 9), found=1.0), 0))
    memory = {"resident_blocks": 0, "checkpointing": "all"}
    config = validate(tiny_config | {"precision": {"weights": "int8"}, "memory": memory}, "test")
    needed = sum(estimate(config, L4.capability, SIZE).host.values())
    monkeypatch.setattr(forecasting, "usable_memory", lambda: needed)
    estimate_run(config, CUDA, SIZE)
    monkeypatch.setattr(forecasting, "usable_memory", lambda: needed - 1)
    with pytest.raises(UserError, match="this run needs .* are usable. Use a larger memory.resident_blocks") as it:
        estimate_run(config, CUDA, SIZE)
    assert "memory.host_weights=mapped" in str(it.value) and "libraries" in str(it.value)
    estimate_run(config, CUDA, SIZE, force=True)
    assert "main memory" in capsys.readouterr().out
    monkeypatch.setattr(forecasting, "usable_memory", lambda: None)  # a system that does not say
    estimate_run(config, CUDA, SIZE)


def test_a_container_s_limit_is_the_memory_that_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amounts, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    amounts.write_text("MemTotal:       2048 kB\nMemFree:        1 kB\n")
    monkeypatch.setattr(host_memory, "AMOUNTS", amounts)
    monkeypatch.setattr(host_memory, "LIMITS", (limit, tmp_path / "none"))
    for text, usable in (("max\n", 2048 * 1024), ("4096\n", 4096), ("99999999\n", 2048 * 1024)):
        limit.write_text(text)
        assert host_memory.usable_memory() == usable
    amounts.unlink()
    assert host_memory.usable_memory() is None


def test_measured_stands_beside_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU a stage whose results were all cached measures a peak of 0.0."""
    found = an_estimate(text=900 * MIB, train=1000 * MIB, validate=600 * MIB)
    print_comparison(compare_with_measured(found, {"text": {}, "train": {}, "validate": {}}))
    assert capsys.readouterr().out == ""
    measured = {"text": 0.0, "train": 800 / 1024, "validate": None}
    told = compare_with_measured(found, {name: {"peak_allocated_gib": gib} for name, gib in measured.items()})
    assert told["stages"]["train"]["measured_mib"] == 800 and told["stages"]["train"]["error"] == pytest.approx(0.25)
    assert not any({"measured_mib", "error"} & set(told["stages"][name]) for name in ("text", "validate"))
    print_comparison(told)
    title, line = capsys.readouterr().out.splitlines()
    assert "predicted, measured" in title and line.split() == ["train", "1,000", "800", "+25.0%"]


def test_the_second_run_with_a_full_cache_ends_as_a_gpu_measures_it(
    tiny_config: dict, train_once: TrainOnce, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage but training allocates nothing: the run still writes its summary and its report."""
    unasked = train_once(tiny_config)
    tiny_config["train"]["steps"] = 1
    tiny_config["output"]["report"] = True
    assert "predicted" not in json.loads((unasked / "summary.json").read_text())
    close = StageTimer._close

    def as_on_a_gpu(self: StageTimer, name: str) -> None:
        close(self, name)
        self.by_name[name].merge(Stage(peak_allocated_gib=0.25 * (name == "train"), peak_reserved_gib=0.0))

    monkeypatch.setattr(StageTimer, "_close", as_on_a_gpu)
    tiny_config["name"] = "second"
    folder = train(validate(tiny_config, "second"), estimate_first=True)
    stages = json.loads((folder / "summary.json").read_text())["predicted"]["stages"]
    assert [name for name, stage in stages.items() if "measured_mib" in stage] == ["train"]
    assert set(stages) >= {"text", "latents", "train"} and "memory  predicted peak" in capsys.readouterr().out
    assert stages["train"]["measured_mib"] == 256 and (folder / "report.html").is_file()


def test_a_job_is_compared_on_several_cards(
    tiny_config: dict, write_config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each card, with why it cannot run the job: its type or its memory."""
    file, prices = write_config(tiny_config), tmp_path / "prices.json"
    prices.write_text('{"L4": {"per_hour": 7200, "as_of": "2026-11", "source": "mine", "currency": "USD"}}')
    asked = ["estimate", str(file), "precision.weights=bf16", "precision.compute=bf16", "--prices", str(prices)]
    asked += ["--device", "L4, T4,0.4GiB"]
    found = told_of(asked, capsys)
    assert found["name"] == "tiny" and [each["why_not"] for each in found["cards"]] == [
        None, "has no bf16", "does not fit",
    ]  # fmt: skip
    assert found["cards"][2]["needed_mib"] > 410
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "predict tiny on T4" in said and "tiny: predicted time and price" in said
    line = next(line for line in said.splitlines() if line.startswith("  L4 ") and "USD" in line)
    assert line.endswith("fastest, cheapest")
    cost = float(line.split()[line.split().index("USD") - 1])
    assert cost == pytest.approx(2 * found["cards"][0]["seconds"], abs=0.01)  # 2 USD a second
    assert told_of([*asked[:-1], "L4,T4", "--reserve", "24"], capsys)["cards"][0]["why_not"] == "does not fit"
