"""The time of a step: grids of seconds, what is recorded of a simulated step, streams that wait, prices."""

from __future__ import annotations

import copy
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recorded_work import seen

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.cuda_libraries import attention_kernel
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.estimate.disk_needs import DataCounts
from simpletune.estimate.job_time import OTHER_CORES, STATED, THIS_CORE, JobTime, job_time, speeds_of, step_range
from simpletune.estimate.simulate.reports import JobReport, StepReport
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.simulate.simulate_stages import simulate_parts
from simpletune.estimate.terminal import card_table, format_duration
from simpletune.estimate.timing import calibrate, cpu_speed
from simpletune.estimate.timing.constants import (
    Composite,
    Constants,
    Grid,
    constants_file,
    points,
    read_constants,
    write_constants,
)
from simpletune.estimate.timing.datasheet import CORE, LAUNCH, DatasheetSpeeds
from simpletune.estimate.timing.host_probes import core_seconds, launch_seconds, measure_host
from simpletune.estimate.timing.larger_batch import LargerBatch, find_larger_batch, scaled_bytes, scaled_sections
from simpletune.estimate.timing.probes import TimingProbe
from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork
from simpletune.estimate.timing.speeds import CalibratedSpeeds, HostSpeeds
from simpletune.estimate.timing.stopwatch import Call
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds
from simpletune.models.shared.flops import trained_of
from simpletune.system.gpus import CARDS, Card, find_card
from simpletune.system.options import UserError
from simpletune.system.prices import Price, card_prices

L4 = find_card("L4")


def with_blocks(tiny_config: dict, three_blocks: Path, **changes: object) -> TrainConfig:
    model = tiny_config["model"] | {"pretrained": str(three_blocks)}
    return validate(tiny_config | {"model": model} | changes, "test")


def law(*point: float) -> float:
    return 1e-9 * math.prod(point)


def grid(seconds: Callable[..., float | None] = law, **axes: list[int]) -> Grid:
    return Grid(axes=axes, seconds=[seconds(*point) for point in points(axes)])


def test_a_power_law_is_met_between_and_beyond_the_points() -> None:
    found = grid(rows=[4, 16], sum=[10, 40])
    for point in ((4, 10), (6, 20), (16, 40), (100, 1000)):
        assert found.time(*point) == pytest.approx(law(*point))
    assert found.time(1, 1) == pytest.approx(law(4, 10))  # a launch takes what it takes
    found = grid(lambda m, k: None if m * k > 100 else law(m, k), rows=[4, 16], sum=[10, 40])
    assert found.time(16, 40) == pytest.approx(law(16, 40))  # not measured: from its smaller neighbour
    with pytest.raises(ValueError, match="2 points"):
        Grid(axes={"bytes": [1, 2, 3]}, seconds=[1.0, 2.0]).time(2)


X, W, V = torch.ones(64, 96), torch.ones(32, 96), torch.ones(96, 32)
Q = torch.ones(2, 3, 128, 16)


@pytest.mark.parametrize(
    ("call", "works"),
    [
        (lambda: X @ W.t(), [("product_tn", (64, 32, 96))]),
        (lambda: X @ V, [("product_nn", (64, 32, 96))]),
        (lambda: X.t() @ torch.ones(64, 8), [("add", (2048,)), ("product_nt", (96, 8, 64))]),
        (lambda: torch.addmm(torch.ones(32), X, V),
         [("add", (128,)), ("product_nn", (64, 32, 96)), ("bias", (16384,))]),
        (lambda: X.view(-1).expand(4, -1), []),
        (lambda: X + X[:1], [("add", (4 * 96 * (64 + 1 + 64),))]),
        (lambda: X.bfloat16().float(), [("add", (64 * 96 * 6,))] * 2),
        (lambda: X.clone().zero_(), [("add", (49152,)), ("add", (24576,))]),
        (lambda: torch._safe_softmax(X, -1), [("softmax", (49152,))]),
        (lambda: torch.nn.functional.silu(X), [("add", (49152,))]),
        (lambda: X.new_empty(64, 96).resize_(96, 64).unsqueeze_(0), []),
        (lambda: X.sum().item(), [("add", (64 * 96 * 4 + 4,))]),
        (lambda: X.new_ones(96), [("add", (96 * 4,))]),
        (lambda: (torch.rand_like(X), X.clone().exponential_()),
         [("normal", (24576,)), ("add", (49152,)), ("normal", (24576,))]),
        (lambda: torch.native_dropout(X, 0.5, True), [("normal", (24576 * 2 + 64 * 96,))]),
        (lambda: X.t().contiguous(), [("strided", (49152,))]),
        (lambda: torch.nn.functional.scaled_dot_product_attention(Q, Q, Q), [("attention", (6, 128, 128, 16))]),
        (lambda: torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, torch.zeros(1, 1, 1, 128)),
         [("add", (512,)), ("attention_masked", (6, 128, 128, 16))]),
        (lambda: torch.nn.functional.conv2d(torch.ones(1, 8, 16, 16), torch.ones(4, 8, 3, 3), padding=1),
         [("add", (8192,)), ("add", (1152,)), ("convolution", (256, 8, 4))]),
    ],
)  # fmt: skip
def test_what_an_operation_makes_the_device_do(call: Callable[[], object], works: list[tuple]) -> None:
    assert [(work.kind, work.extents) for work in seen(call)] == works


class Seconds:
    """A device whose work takes as many seconds as its first extent, and whose host takes 0.1 an operation."""

    cuda = True
    rates: dict = {}
    launch = 0.0

    def seconds(self, kind: str, dtype: str, extents: tuple[int, ...]) -> float:
        return float(extents[0])

    def host(self, what: str) -> float:
        return 0.1


def section(stream: str, seconds: int, **more: object) -> StreamWork:
    kind = "add" if stream == COMPUTE else "to_device"
    return StreamWork(stream, "forward", "", work=Counter({KernelWork(kind, "fp32", (seconds,)): 1}), **more)  # type: ignore[arg-type]


def test_a_copy_hides_behind_the_computation_until_it_is_longer() -> None:
    """Block 1 computes 3 s while block 2's weights arrive; block 2 computes 3 s more."""
    for copied, step, waits in ((2, 6, 0), (3, 6, 0), (5, 8, 2)):
        sections = [
            section(COMPUTE, 0, event=1), section("copies", copied, after=[1], event=2), section(COMPUTE, 3),
            section(COMPUTE, 3, after=[2]),
        ]  # fmt: skip
        found = step_seconds(sections, Seconds())
        assert (found.seconds, found.waits) == (pytest.approx(step), pytest.approx(waits))


def test_the_host_bounds_a_step_of_many_small_operations() -> None:
    sections = [StreamWork(COMPUTE, "forward", "", host=Counter(operation=50)), section(COMPUTE, 2)]
    found = step_seconds(sections, Seconds())
    assert found.bound == "launches" and found.seconds == pytest.approx(5.0)
    assert step_seconds(sections[1:], Seconds()).bound == "bytes"


def test_a_step_is_limited_by_what_takes_longest() -> None:
    host = StreamWork(COMPUTE, "forward", "", host=Counter(operation=60))  # 6 s
    for copied, computed, more, limit in ((2, 4, [], "card"), (5, 4, [], "link"), (5, 4, [host], "host")):
        sections = [section(COMPUTE, computed), section("copies 1", copied), section("copies 2", 1), *more]
        assert step_seconds(sections, Seconds()).limit == limit
    waiting = replace(section(COMPUTE, 3), work=Counter({KernelWork("to_host", "bytes", (3,)): 1}))
    assert step_seconds([section(COMPUTE, 4), section("copies 1", 2), waiting], Seconds()).limit == "link"


def kernel(kind: str, *extents: int) -> KernelWork:
    return KernelWork(kind, "bf16", extents)


def test_kernels_that_python_launches_are_tasks_of_their_own(tiny_config: dict, simulate_once: Callable) -> None:
    def tasks(**precision: str) -> Counter[str]:
        found: Counter[str] = Counter()
        options = {"weights": "int8", **precision}
        report = simulate_once(validate(tiny_config | {"precision": options, "train": {"steps": 1}}, "x"))
        for each in report.sections:
            found.update(each.host)
        return found

    plain = tasks()
    assert tasks(products="int8")["tuned"] > 0 == plain["tuned"]
    assert tasks(weights="nf4")["kernel"] > plain["kernel"]


def test_a_larger_batch_scales_everything_but_the_weights() -> None:
    passes = {kernel("product_tn", 64, 32, 96): 2, kernel("attention", 6, 128, 128, 16): 1, kernel("each", 5, 40): 1}
    kept = {kernel("unpack_nf4", 100): 1, kernel("to_device", 70): 1}
    parked = {kernel("to_host", 50): 1}
    sections = [
        StreamWork(COMPUTE, "", "", work=Counter({kernel("to_device", 9): 1})),  # the batch
        StreamWork(COMPUTE, "forward", "", work=Counter({**passes, kernel("unpack_nf4", 100): 1})),
        StreamWork("copies 1", "forward", "", work=Counter({kernel("to_device", 70): 1, **parked})),
        StreamWork("copies 1", "backward", "", work=Counter({kernel("to_device", 50): 1})),
        StreamWork(COMPUTE, "optimizer", "", work=Counter({kernel("each", 5, 40): 1, kernel("to_host", 30): 1})),
    ]
    first, computed, there, back, update = (each.work for each in scaled_sections(sections, 4))
    assert first == {kernel("to_device", 36): 1}
    grown = {kernel("product_tn", 256, 32, 96): 2, kernel("attention", 24, 128, 128, 16): 1, kernel("each", 5, 160): 1}
    assert computed == {**grown, kernel("unpack_nf4", 100): 1}
    assert there == {kernel("to_device", 70): 1, kernel("to_host", 200): 1} and back == {kernel("to_device", 200): 1}
    assert update == sections[-1].work and kept.keys() <= computed.keys() | there.keys()


def test_a_larger_batch_is_nearly_a_simulated_one(
    tiny_config: dict, three_blocks: Path, simulate_once: Callable
) -> None:
    """Of which the host's part grows a little, too: some operations only run for several pictures."""
    one, four = (
        simulate_once(with_blocks(tiny_config, three_blocks, train={"steps": 1, "batch_size": batch}))
        for batch in (1, 4)
    )
    scaled = scaled_sections(one.sections, 4)
    assert operations(work_of(replace(one, sections=scaled))) == pytest.approx(operations(work_of(four)), rel=0.01)
    for name in ("L4", "H100"):
        speeds = speeds_of(find_card(name), Path("none"))[0]
        seconds, simulated = (step_seconds(each, speeds).seconds for each in (scaled, four.sections))
        assert seconds == pytest.approx(simulated, rel=0.1)
    peak = max(scaled_bytes(each, 4) for each in one.phases.values())
    assert four.peak.bytes <= peak <= 1.05 * four.peak.bytes


def test_a_larger_batch_is_named_where_it_saves_a_fifth_and_is_possible(tiny_config: dict) -> None:
    host = StreamWork(COMPUTE, "forward", "", host=Counter(operation=20))  # 2 s
    peaks = {"forward": MemorySnapshot(100, {"weights": 60, "activations": 40})}
    asked: list[tuple[int, int]] = []

    def found(seconds: int, most: int = 1000, **train: object) -> LargerBatch | None:
        option = validate(tiny_config | {"train": {"steps": 9, "batch_size": 2} | train}, "x").train

        def may(factor: int, peak: int) -> bool:
            asked.append((factor, peak))
            return peak <= most

        return find_larger_batch([host, section(COMPUTE, seconds)], Seconds(), option, peaks, may)

    larger = found(1)  # 4 s instead of 2
    assert asked == [(4, 220), (2, 140)]
    assert larger is not None and (larger.batch_size, larger.pictures, larger.step) == (8, 2.0, 2.0)
    assert "train.batch_size=8: a step would take 2.0 times as long" in larger.words
    assert "the same time trains 2.0 times as many pictures; a different training" in larger.words
    smaller = found(1, 200)
    assert smaller is not None and smaller.batch_size == 4 and found(1, 100) is None
    assert found(2) is None  # the card is as busy as the host
    again = found(1, gradient_accumulation=8)
    assert again is not None and "with train.gradient_accumulation=2 the steps see the same pictures" in again.words


def work_of(report: StepReport) -> Counter[KernelWork]:
    total = Counter[KernelWork]()
    for each in report.sections:
        total.update(each.work)
    return total


def operations(total: Counter[KernelWork]) -> int:
    """Of all products, two a multiply-add; attention's forward pass has two products and its backward pass five."""
    found = 0
    for (kind, _, extents), count in total.items():
        if kind.startswith(("product", "convolution", "attention")):
            times = {"attention": 4, "attention_backward": 10}.get(kind, 18 if kind.startswith("conv") else 2)
            found += times * count * math.prod(extents)
    return found


@pytest.mark.parametrize("checkpointing", ["none", "all", 1])
def test_recorded_products_are_the_counted_operations(
    checkpointing: object, tiny_config: dict, three_blocks: Path, simulate_once: Callable
) -> None:
    """Counted in another way (models/shared/flops.py), without the recomputation inside fused attention."""
    config = with_blocks(tiny_config, three_blocks, memory={"checkpointing": checkpointing})
    report = simulate_once(config)
    total, blocks = work_of(report), config.memory.checkpointed_count(config.model.architecture.blocks())
    counted = config.model.flops(trained_of(report.trained), (32, 32), config.train.batch_size, blocks)
    again = sum(2 * count * math.prod(w.extents) for w, count in total.items() if w.kind == "attention_backward")
    assert operations(total) - again == pytest.approx(counted.model + counted.recomputed, rel=0.02)


def moved(report: StepReport, kind: str) -> int:
    return sum(work.extents[0] * n for each in report.sections for work, n in each.work.items() if work.kind == kind)


def test_streamed_blocks_are_copied_once_in_each_pass(
    tiny_config: dict, three_blocks: Path, simulate_once: Callable
) -> None:
    resident = with_blocks(tiny_config, three_blocks, memory={"checkpointing": "all"})
    streamed = with_blocks(tiny_config, three_blocks, memory={"checkpointing": "all", "resident_blocks": 0})
    before, after = (simulate_once(config) for config in (resident, streamed))
    extra = moved(after, "to_device") - moved(before, "to_device")
    # All three in the forward pass, at whose end the two slots hold the last two; then the first again.
    assert 1.3 * after.host_bytes <= extra <= 1.4 * after.host_bytes
    assert {each.stream for each in after.sections} > {COMPUTE}
    slow = DatasheetSpeeds(Card("slow", 8, (8, 9), 121, 300, link=0.01))
    assert step_seconds(after.sections, slow).bound == "copies"
    assert step_seconds(before.sections, slow).bound != "copies"


def test_accumulation_and_a_plan_count_their_share(tiny_config: dict) -> None:
    trains = [{"train": {"steps": 1, "gradient_accumulation": n}} for n in (1, 2)]
    one, two = (work_of(simulate(validate(tiny_config | train, "x"))) for train in trains)
    assert operations(two) == 2 * operations(one)
    plan = simulate(validate({**tiny_config, "memory": {"modulation": "plan", "modulation_window": 8}}, "x"))
    assert {each.share for each in plan.sections} == {1.0, 1 / 8}


def test_a_stored_prediction_keeps_the_sections(tiny_config: dict) -> None:
    data = copy.deepcopy(tiny_config) | {"validation": {"prompts": ["a"], "steps": 4, "loss_samples": 2}}
    job = simulate_parts(validate(data, "x"), (32, 32), (8, 9))
    again = JobReport.from_json(json.loads(json.dumps(job.as_json())))
    assert list(again.train.sections) == list(job.train.sections) and again.work == job.work
    assert {"latents", "draw", "evaluate"} < set(job.work) and any(name.startswith("text.") for name in job.work)
    config = validate(data, "x")
    found, more, most = (job_time(config, job, L4, DataCounts(n, n, n * 32**2, n)) for n in (4, 8, 16))
    each = more.stages["latents"] - found.stages["latents"]
    assert each > 0 and most.stages["latents"] - more.stages["latents"] == pytest.approx(2 * each)
    assert found.stages["train"] == pytest.approx(found.steps * found.step.seconds)


def test_a_cards_figures_move_what_they_bound() -> None:
    twice = Card("L4", 24, (8, 9), 242, 600, 48, fp32_tflops=30, multiprocessors=58)
    plain, faster = DatasheetSpeeds(L4), DatasheetSpeeds(twice)
    product, traffic = ("product_tn", "bf16", (8192, 8192, 8192)), ("add", "bf16", (10**9,))
    for work in (product, traffic, ("to_device", "bytes", (10**9,))):
        assert plain.seconds(*work) / faster.seconds(*work) == pytest.approx(2, rel=0.01)
    assert plain.seconds(*product) == pytest.approx(2 * 8192**3 / 57e12, rel=0.05)  # measured by others on an L4
    assert plain.seconds("product_tn", "bf16", (16, 64, 64)) < 6e-6
    assert all(DatasheetSpeeds(card).is_known for card in CARDS)


def rate(card: str, kind: str, dtype: str, operations: int, extents: tuple[int, ...]) -> float:
    """TFLOP/s of a large operation on a card."""
    return operations / DatasheetSpeeds(find_card(card)).seconds(kind, dtype, extents) / 1e12


def test_attention_runs_at_the_rate_of_its_kernel_on_a_card() -> None:
    """An A100's by flash attention's paper, an H100's and a B200's as others measured it, a T4's by torch's only kernel
    there."""
    heads = 24, 4429, 4429, 64
    operations = 4 * math.prod(heads)
    for card, dtype, low, high in (
        ("A100-40GB", "bf16", 180, 228), ("H100", "bf16", 260, 330), ("B200", "bf16", 300, 380), ("T4", "fp16", 12, 18),
    ):  # fmt: skip
        assert low < rate(card, "attention", dtype, operations, heads) < high, card
        assert low / 1.4 < rate(card, "attention_backward", dtype, operations * 5 // 2, heads) < high, card
    for card in CARDS:
        for name in ("fp32", "fp16"):
            kernel = attention_kernel(card.capability, name)
            assert DatasheetSpeeds(card).attention(name, 64).partition(" ")[0] == kernel, card.name
    wide = 16, 8192, 8192, 128
    assert rate("H100", "attention", "bf16", 4 * math.prod(wide), wide) == pytest.approx(370, rel=0.05)
    assert rate("H100", "attention_backward", "bf16", 10 * math.prod(wide), wide) == pytest.approx(290, rel=0.05)


def test_products_with_short_sums_are_slower_on_the_fastest_memory() -> None:
    """As others measured cuBLAS: triton-lang/triton#2339 and #6523, pytorch#181718."""
    for card, m, k, tflops in (
        ("H100", 2048, 2048, 515), ("H100", 2048, 4096, 614), ("H100", 2048, 8192, 722), ("A100-40GB", 1536, 1536, 141),
        ("A100-40GB", 2560, 2560, 161), ("RTX4090", 2040, 2040, 156),
    ):  # fmt: skip
        assert rate(card, "product_tn", "bf16", 2 * m * k * k, (m, k, k)) == pytest.approx(tflops, rel=0.25), (card, k)
    narrow = DatasheetSpeeds(find_card("H100")).seconds("product_tn", "bf16", (4429, 1536, 16))
    assert narrow < 10e-6, "bounded by its traffic"


@pytest.mark.parametrize("backward", [False, True])
def test_attention_with_a_mask_runs_at_the_rate_of_the_memory_efficient_kernel(backward: bool) -> None:
    """Half of flash attention's on an L4, and the same as without a mask where torch has no other kernel."""
    heads, end = (24, 4429, 4429, 64), "_backward" * backward
    for card, dtype, times in (
        ("L4", "bf16", 0.65 / 0.3 if backward else 2), ("H100", "bf16", 0.36 / 0.3 if backward else 1),
        ("L4", "fp32", 1), ("T4", "fp16", 1),
    ):  # fmt: skip
        seconds = DatasheetSpeeds(find_card(card)).seconds
        ratio = seconds(f"attention_masked{end}", dtype, heads) / seconds(f"attention{end}", dtype, heads)
        assert ratio == pytest.approx(times, rel=0.01), (card, dtype)
    points = {"heads": [2], "queries": [64, 512], "keys": [64, 512], "width": [64]}

    def timed(**factors: float) -> CalibratedSpeeds:
        own = {f"{kind}.bf16": grid(lambda *p, f=f: f * law(*p), **points) for kind, f in factors.items()}
        return CalibratedSpeeds(constants(grids={**constants().grids, **own}))

    older = {"attention": 1.0, "attention_both": 3.5}
    own = timed(**older, attention_masked=2.0, attention_masked_both=7.0)
    point, kind = (2, 512, 512, 64), f"attention_masked{end}"
    assert own.seconds(kind, "bf16", point) == pytest.approx((5 if backward else 2) * law(*point))
    assert timed(**older).seconds(kind, "bf16", point) == pytest.approx((2.5 if backward else 1) * law(*point))


def test_geforce_multiplies_int8_at_four_times_its_16_bits_others_at_twice() -> None:
    """Less the scales; its products in 16 bits sum in fp32 at half of the tensor cores' rate."""
    point, few = (8192, 8192, 8192), 2 * 8192**3
    for card, times in (("L4", 1.9), ("A100-40GB", 1.9), ("RTX3060-12GB", 3.8), ("RTX4090", 3.8), ("RTX2060", 3.8)):
        for kind in ("int8_product", "int8_gradient"):
            ratio = rate(card, kind, "bf16", few, point) / rate(card, "product_tn", "bf16", few, point)
            assert ratio == pytest.approx(times, rel=0.03), card


def test_a_range_folds_the_device_s_factors_with_those_of_other_machines_cores() -> None:
    launches = [StreamWork(COMPUTE, "forward", "", host=Counter(operation=1000))]
    products = [StreamWork(COMPUTE, "forward", "", work=Counter({KernelWork("product_tn", "bf16", (8192,) * 3): 10}))]
    speeds = DatasheetSpeeds(L4)
    for sections, expected in ((launches, OTHER_CORES), (products, STATED)):
        assert step_range(sections, speeds, step_seconds(sections, speeds)) == pytest.approx(expected)


def test_a_core_that_was_timed_scales_the_host_s_part_and_narrows_its_range() -> None:
    launches = [StreamWork(COMPUTE, "forward", "", host=Counter(operation=1000))]
    slow, ours = DatasheetSpeeds(L4, HostSpeeds(core=2 * CORE)), DatasheetSpeeds(L4)
    step = step_seconds(launches, slow)
    assert step.seconds == pytest.approx(2 * step_seconds(launches, ours).seconds) and slow.launch == 2 * LAUNCH
    assert step_range(launches, slow, step) == pytest.approx(THIS_CORE)
    assert 0.1 * CORE < core_seconds() < 20 * CORE
    alone = measure_host(torch.device("cpu"))
    assert alone.launch is alone.to_device is alone.to_host is None and 0.1 * CORE < alone.core < 20 * CORE


def test_a_core_s_seconds_count_what_other_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the loops would not see it."""
    clock = iter([at for loop in range(51) for at in (0.0, 1e-4 if loop % 2 else 3e-4)])
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    assert core_seconds() == pytest.approx(2e-4)


def test_a_measured_launch_and_link_replace_those_of_the_card() -> None:
    host = HostSpeeds(core=2 * CORE, launch=30e-6, to_device=12.0, to_host=6.0)
    here, there = DatasheetSpeeds(L4, host), DatasheetSpeeds(L4)
    assert here.launch == 30e-6, "not scaled by the core: it was measured on it"
    size = (2**30,)
    for kind, times in (("to_device", L4.link / 12), ("to_host", L4.link / 6)):
        assert here.seconds(kind, "bytes", size) == pytest.approx(times * there.seconds(kind, "bytes", size), rel=1e-3)


def test_a_launch_s_seconds_are_those_beyond_a_call_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Number:
        def __init__(self, size: int, device: torch.device):
            self._seconds = 205e-6 if device.type == "cuda" else 5e-6

        def mul_(self, factor: float) -> None:
            clock[0] += self._seconds

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "ones", Number)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert launch_seconds(torch.device("cuda")) == pytest.approx(200e-6)


@pytest.mark.dry
def test_a_simulated_card_s_host_is_measured() -> None:
    """Its launches cost next to nothing."""
    before, found = torch.cuda.memory_allocated(), measure_host(torch.device("cuda"))
    assert found.launch is not None and found.launch < 5e-6 and found.to_device and found.to_host
    assert torch.cuda.memory_allocated() == before


def test_the_driver_s_part_of_a_launch_is_added_where_it_was_not_measured() -> None:
    sections = [
        StreamWork(COMPUTE, "", "", work=Counter({KernelWork(kind, "bf16", (1,)): 7 for kind in ("add", "bias")}))
    ]
    assert step_seconds(sections, DatasheetSpeeds(L4)).host == pytest.approx(7 * LAUNCH)
    assert step_seconds(sections, CalibratedSpeeds(constants())).host == 0


def constants(**changes: object) -> Constants:
    data: dict = {
        "version": 1, "device": "NVIDIA L4", "kind": "cuda", "capability": [8, 9], "memory_bytes": L4.bytes,
        "threads": 1, "date": "2026-11-22", "versions": "", "seconds": 1.0,
        "host": {"operation": 1e-6, "backward": 3e-6, "view": 0.0},
        "grids": {"add.fp32": grid(lambda size: 1e-12 * size, bytes=[1000, 10**6])},
    }  # fmt: skip
    return Constants(**{**data, **changes})


def test_a_calibration_is_found_by_the_cards_name(tmp_path: Path) -> None:
    assert "not calibrated" in speeds_of(L4, tmp_path)[2]
    write_constants(constants_file(tmp_path, "NVIDIA L4", 1, "cuda"), constants())
    speeds, interval, source = speeds_of(L4, tmp_path)
    assert "calibrated on NVIDIA L4" in source and interval[0] > 0.7
    assert speeds.seconds("add", "fp32", (10**6,)) == pytest.approx(1e-6)
    assert all("not calibrated" in speeds_of(find_card(name), tmp_path)[2] for name in ("T4", "L40S"))
    assert "no figures are known for this card" in speeds_of(find_card("11GiB"), tmp_path)[2]
    constants_file(tmp_path, "NVIDIA L4", 1, "cuda").write_text("{}")
    with pytest.raises(UserError, match="simpletune doctor --calibrate"):
        speeds_of(L4, tmp_path)


def test_a_calibration_without_a_kind_says_so() -> None:
    speeds = CalibratedSpeeds(constants())
    with pytest.raises(UserError, match=r"NVIDIA L4 lacks convolution\.bf16. Run simpletune doctor --calibrate again"):
        speeds.seconds("convolution", "bf16", (64, 64, 64))
    assert speeds.seconds("norm", "bf16", (1000,)) == pytest.approx(1e-9)  # as bytes moved
    with pytest.raises(UserError, match=r"lacks norm\.fp32"):
        CalibratedSpeeds(constants(grids={})).seconds("norm", "fp32", (1000,))


def test_a_whole_step_scales_its_parts() -> None:
    step = Composite(seconds=30e-6, host={"operation": 10}, work=[("add", "fp32", [1000], 10)])
    speeds = CalibratedSpeeds(constants(composites=[step]))
    assert speeds.host("operation") == pytest.approx(3e-6)  # 10 of them took 30 us, not 10
    larger = Composite(seconds=2e-3, host={"operation": 10}, work=[("add", "fp32", [10**9], 1)])
    assert CalibratedSpeeds(constants(composites=[step, larger])).seconds("add", "fp32", (1000,)) == pytest.approx(2e-9)


def test_kinds_that_only_older_calibrations_have_are_read_with_them(tmp_path: Path) -> None:
    smallest = Composite(seconds=1e-5, host={"operation": 10}, work=[])
    step = smallest.model_copy(update={"seconds": 1e-3, "work": [("silu", "fp32", [10**6], 1)]})
    slower = grid(lambda size: 5e-10 * size, bytes=[1000, 10**6])
    given = constants(grids={**constants().grids, "silu.fp32": slower}, composites=[smallest, step])
    write_constants(tmp_path / "older.json", given)
    speeds = CalibratedSpeeds(read_constants(tmp_path / "older.json"))
    assert speeds.seconds("add", "fp32", (1000,)) == pytest.approx(2e-9), "the step took twice as long as its silu"


def test_calibration_leaves_out_what_takes_too_long() -> None:
    asked: list[int] = []
    watch = SimpleNamespace(
        device=torch.device("cpu"), beyond_caches=100, most_copies=4,
        device_seconds=lambda calls, what="": (asked.append(len(calls)), calls[0]())[1],
    )  # fmt: skip
    probe = TimingProbe("add.fp32", {"bytes": [1, 20, 10**6, 10**8]}, lambda size: lambda: size * 1e-3, int)
    assert calibrate.grid_of(watch, probe).seconds == [1e-3, 0.02, None, None]  # type: ignore[arg-type]
    assert asked[0] == 4  # copies of small operands take turns


def test_calibrate_needs_the_device(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    assert main(["doctor", "--calibrate", "--device", "cuda", "--out", str(tmp_path / "c.json")]) == 2
    assert "Use --device cpu" in capsys.readouterr().err


def row(name: str, seconds: float, per_hour: float | None, why_not: str = "") -> tuple[JobTime, str]:
    step = StepSeconds(seconds, {"products": seconds}, 0.0, 0.0)
    price = None if per_hour is None else Price(per_hour=per_hour, as_of="2026-11", source="test", currency="USD")
    stages = {"train": 3600 * seconds}
    return JobTime(find_card(name), step, 3600, None, stages, (0.5, 2.0), "stated", price), why_not


def test_the_fastest_and_the_cheapest_card_are_marked_by_the_users_own_prices_first(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"l4": {"per_hour": 0.2, "as_of": "2026-11", "source": "mine"}}')
    assert card_prices()["l4"].per_hour == 0.7068 and card_prices(file)["l4"].source == "mine"
    assert set(card_prices()) <= {card.name.lower() for card in CARDS}
    rows = [row("L4", 2.0, 1.0), row("H100", 0.5, 8.0), row("RTX3090", 1.0, None), row("T4", 0.1, 0.1, "does not fit")]
    told = [line for line in card_table("job", rows) if "USD" in line or "price" in line or "fit" in line]
    lines = {line.split()[0]: line for line in told}
    assert lines["L4"].endswith("cheapest") and " 2.00 " in lines["L4"] and " 4.00 " in lines["L4"]
    assert lines["H100"].endswith("fastest") and "4.00 USD" in lines["H100"]
    assert "no price known" in lines["RTX3090"] and lines["T4"].endswith("does not fit")


def test_a_large_operation_is_timed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to what it moves or computes; a small one as it is."""
    built: list[tuple[int, ...]] = []

    def build(*point: int) -> Call:
        built.append(point)
        return lambda: None

    monkeypatch.setattr(cpu_speed, "_seconds", lambda calls: math.prod(built[-1]) * 1e-9)
    traffic = TimingProbe("add.fp32", {"bytes": [1]}, build, int)
    for size in (4096, 2**27, 3 * 2**27 + 1):
        assert cpu_speed.time_operation(traffic, (size,)) == pytest.approx(size * 1e-9)
    assert max(point[0] for point in built) <= cpu_speed.LARGEST
    assert built[0] == (4096,) and len(built) == cpu_speed.COPIES + 2, "small operands take turns"
    products = TimingProbe("product.fp32", {"rows": [1], "outputs": [1], "sum": [1]}, build, lambda *point: 1)
    assert cpu_speed.time_operation(products, (4096, 6144, 1536)) == pytest.approx(4096 * 6144 * 1536 * 1e-9)
    assert math.prod(built[-1]) <= cpu_speed.MOST_PRODUCTS


def test_the_speeds_of_a_moment_grow_with_the_work() -> None:
    speeds = cpu_speed.current_cpu_speeds()
    assert cpu_speed.current_cpu_speeds() is speeds and not speeds.cuda
    small, large = (speeds.seconds("product_tn", "fp32", (size, size, size)) for size in (16, 512))
    assert 0 < 10 * small < large
    assert 0 < speeds.seconds("add", "fp32", (4096,)) < speeds.seconds("add", "fp32", (2**24,))
    assert speeds.seconds("unheard_of", "bf16", (4096,)) > 0 and speeds.host("module") > 0


def test_a_duration_has_a_suitable_unit() -> None:
    words = {
        0.0123: "12 ms", 0.9994: "999 ms", 1: "1.00 s", 9.994: "9.99 s", 10: "10 s", 119.6: "120 s",
        120: "2 min", 7199: "120 min", 7200: "2.0 h", 9000: "2.5 h",
    }  # fmt: skip
    assert {seconds: format_duration(seconds) for seconds in words} == words
