"""Predict a run's memory and time before it starts, and compare its memory with the measurement at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Plan
from simpletune.estimate.disk_needs import DataCounts
from simpletune.estimate.job_estimate import CONTEXT, MIB, Estimate, estimate, shortage, snapshot_json
from simpletune.estimate.job_time import CALIBRATED, JobTime, job_time
from simpletune.estimate.levers import LEVERS, effective_overrides, with_effective_changes
from simpletune.estimate.planning import Search
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.terminal import format_duration, place
from simpletune.estimate.timing.constants import constants_file, read_constants
from simpletune.estimate.timing.host_probes import measure_host
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.speeds import CalibratedSpeeds
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.models.shared.buckets import Size
from simpletune.system.console import say
from simpletune.system.environment import cpu_name
from simpletune.system.gpus import Card, card_named_by_driver
from simpletune.system.host_memory import usable_memory
from simpletune.system.options import Json, UserError
from simpletune.system.prices import card_price

WITHOUT_GPU = (8, 9)  # if there is no GPU, count the library workspaces of this capability
Measured = Mapping[str, Mapping[str, float | None]]


def estimate_run(config: TrainConfig, device: torch.device, size: Size, force: bool = False) -> Estimate:
    """Predict a run, print the prediction, and refuse a run that does not fit on a CUDA device, or whose levers need
    more main memory than there is (``force``: warn).

    Args:
        config: with folders resolved.
        size: width and height in pixels of its largest bucket.
    """
    card, held = card_at_hand(device) if device.type == "cuda" else (None, 0)
    prediction = estimate(config, WITHOUT_GPU if card is None else card.capability, size)
    needed, peak = prediction.needed_bytes(), prediction.peak
    on = "" if card is None else f", {needed / MIB:,.0f} with allowances, of {card.bytes / MIB:,.0f} MiB"
    say(f"memory  predicted peak {peak.bytes / MIB:,.0f} MiB ({prediction.peak_stage}: {place(peak)}){on}")
    if card is not None:
        _require_host_memory(config, prediction, force)
    if card is None or not (short := shortage("memory: this run", peak.bytes, card, held)):
        return prediction
    if force:
        missing = needed + held - card.bytes
        say(f"memory  {missing / MIB:,.0f} MiB are missing: the run may run out of memory (--force)")
        return prediction
    lines = [short]
    change = cheapest_change(config, card, held, size)
    if change is not None:
        overrides, costs, less = change
        lines.append(f"  the cheapest change that fits: {' '.join(overrides)} (needs {less / MIB:,.0f} MiB; {costs})")
    else:
        lines.append(f"  no single change fits. Try simpletune plan CONFIG --device {card.gib:.0f}GiB")
    raise UserError("\n".join([*lines, "  --force starts it anyway"]))


def _require_host_memory(config: TrainConfig, prediction: Estimate, force: bool) -> None:
    """Refuse a run that needs more main memory than there is (``force``: warn)."""
    wanted, usable, memory = sum(prediction.host.values()), usable_memory(), config.memory
    if usable is None or wanted <= usable:
        return
    uses = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in prediction.host.items())
    short = (
        f"main memory: this run needs {wanted / 2**30:.1f} GiB (predicted: {uses}) and {usable / 2**30:.1f} are usable"
    )
    if force:
        say(f"warning {short}: the system may end it (--force)")
        return
    blocks, inputs = memory.resident_blocks is not None, memory.offload_checkpoint_inputs
    planned, cached = memory.modulation == "plan", config.precision.cacheable
    weights, fact = blocks or planned, config.model.architecture.modulation
    by_time = fact is not None and not fact.reads_pooled and config.objective.name == "flow" and config.concept is None
    ways = {
        "a larger memory.resident_blocks": blocks,
        "precision.weights=int8": weights and not cached and not config.adapter.trains_base,
        "objective.levels=256": planned and by_time and cached and not config.tabulates_modulations,
        "memory.host_weights=mapped, which is slower": weights and cached and memory.host_weights == "pinned",
        "memory.offload_checkpoint_inputs=false": inputs,
    }
    less = ", or ".join(way for way, helps in ways.items() if helps) or "a machine with more"
    raise UserError(f"{short}. Use {less}\n  --force starts it anyway")


def card_at_hand(device: torch.device) -> tuple[Card, int]:
    """Return the CUDA device as a card, and the bytes of it that other programs use."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    own_context = CONTEXT if torch.cuda.is_initialized() else 0  # the allowances include it
    held = max(0, total - free - torch.cuda.memory_reserved(device) - own_context)
    return card_named_by_driver(properties.name, total, (properties.major, properties.minor)), held


def cheapest_change(
    config: TrainConfig, card: Card, held: int, size: Size | None = None
) -> tuple[tuple[str, ...], str, int] | None:
    """Find the cheapest lever that makes a run fit; if no single one does, the settings that ``plan`` finds.

    Returns:
        The overrides, what they cost, and the bytes that the card must then have; None if nothing fits.
    """
    for lever in LEVERS:
        new = with_effective_changes(config, lever.overrides)
        if new is None or new.resolution != config.resolution:
            continue
        prediction = estimate(new, card.capability, size)
        if prediction.fits(card, held):
            return lever.overrides, lever.costs, prediction.needed_bytes()
    try:
        best = Search(config, card, held).find_fastest()[0]
    except UserError:
        return None
    overrides = effective_overrides(config, best.choice.config, best.choice.overrides)
    return tuple(overrides), best.choice.about, best.estimate.needed_bytes()


def estimate_time(config: TrainConfig, prediction: Estimate, device: torch.device, plan: Plan) -> Json | None:
    """Predict a run's time and price, and print them; on a CPU only the steps. Counts only what is not cached yet, so
    the configuration's folders must be resolved.

    Returns:
        ``JobTime.as_json``; None on a CPU without a calibration, or if the calibration cannot be read, which is
        printed.
    """
    card: Card | None = None
    try:
        if device.type == "cuda":
            card, _ = card_at_hand(device)
            counts = DataCounts.from_uncached(config, plan)
            time = job_time(config, prediction.job, card, counts, host=measure_host(device))
        elif (found := steps_on_cpu(config, plan)) is not None:
            time = found
        else:
            return None
    except UserError as error:  # a run does not need its time
        say(f"warning the time is not predicted: {error}")
        return None
    try:
        time = time if card is None else replace(time, price=card_price(card, config.output.prices))
    except UserError as error:
        say(f"warning the price is not predicted: {error}")
    low, high = time.interval
    money = "" if time.price is None else f", {time.cost:.2f} at {time.price.words}"
    say(
        f"time    predicted {format_duration(time.step.seconds)} a step ({format_duration(time.step.seconds * low)} to "
        f"{format_duration(time.step.seconds * high)}, {time.source}), {format_duration(time.seconds)} the job{money}"
    )
    return time.as_json()


def steps_on_cpu(config: TrainConfig, plan: Plan) -> JobTime | None:
    """Predict a run's steps on this CPU; None if it was not calibrated."""
    name, threads = cpu_name(), torch.get_num_threads()
    file = constants_file(config.output.cache_folder, name, threads, "cpu")
    if not file.is_file():
        return None
    constants = read_constants(file)
    report = simulate(config, plan.largest(), recorder=Recorder(cuda=False))
    step = step_seconds(report.sections, CalibratedSpeeds(constants))
    steps = config.steps(plan.steps_per_epoch)
    source = f"calibrated on {constants.device}, {constants.date}"
    stages = {"train": steps * step.seconds}
    return JobTime(Card(name, 0, (0, 0)), step, steps, plan.steps_per_epoch, stages, CALIBRATED, source)


def compare_with_measured(estimate: Estimate, measured: Measured) -> Json:
    """Return the prediction and the measurement, by stage, in the form of the run's summary.

    A stage without a measured ``peak_allocated_gib`` (None without CUDA, 0.0 if everything was cached) is not compared.
    """
    stages = {name: snapshot_json(snapshot) for name, snapshot in estimate.stages.items()}
    for name, stage in stages.items():
        mib = (measured.get(name, {}).get("peak_allocated_gib") or 0.0) * 1024
        if mib > 0:
            stage["measured_mib"] = round(mib, 1)
            stage["error"] = round(stage["peak_allocated_mib"] / mib - 1, 4)
    return {"stages": stages, "peak_allocated_mib": round(estimate.peak.bytes / MIB, 1)}


def print_comparison(predicted: Json) -> None:
    """Print predicted and measured memory for every stage that was measured."""
    rows = [(name, stage) for name, stage in predicted["stages"].items() if "measured_mib" in stage]
    if rows:
        say("memory on the GPU, MiB: predicted, measured")
    for name, stage in rows:
        predicted_mib, measured_mib = stage["peak_allocated_mib"], stage["measured_mib"]
        say(f"  {name:<10} {predicted_mib:>9,.0f} {measured_mib:>9,.0f}  {stage['error']:+.1%}")
